"""nginx between devices and the SuperLink: it passes the Fleet API, and nothing else, with docs/deploy/nginx.conf."""

import json
import os
import shutil
import ssl
import subprocess
import urllib.error
import urllib.request

import pytest
from test_deployment import ROOT, SMALL_RUN, Federation, app_folder, command, free_ports, listens, wait_for, wait_for_summary

NGINX = shutil.which("nginx", path=f"{os.environ['PATH']}{os.pathsep}/usr/sbin")
CHUNK_BYTES = 5 * 2**20  # of Flower's transfers
# Sent as they are. Some of them lead to the Control API where a proxy resolves them, or where Flower does.
CONTROL_PATHS = (
    "/v1/control/list-runs", "/v1/control/start-run", "/v1/runtime/get-nodes", "/", "/v1/fleet/../control/list-runs",
    "/v1/fleet/%2e%2e/control/list-runs", "/v1/fleet/..%2fcontrol/list-runs", "/v1/control/..%2ffleet/../control/list-runs",
    "//v1/control/list-runs", "/v1/fleet/list-runs/../../control/list-runs", "/V1/control/list-runs",
)  # fmt: skip


def write_nginx(folder, site, **replaced):
    """Write nginx's main configuration around a site of the repository, and return its path."""
    for old, new in replaced.items():
        assert old in site, old
        site = site.replace(old, new)
    (folder / "site.conf").write_text(site)
    places = "".join(f"{name}_temp_path {folder}/{name};\n" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    user = "user root;\n" if os.getuid() == 0 else ""  # its workers read the folder of the test
    (folder / "nginx.conf").write_text(
        f"{user}daemon off;\npid {folder}/nginx.pid;\nerror_log stderr;\nevents {{}}\n"
        f"http {{\naccess_log off;\n{places}include {folder}/site.conf;\n}}\n"
    )
    return folder / "nginx.conf"


def start_proxy(one, name, site, port, **replaced):
    """Start nginx with a site of the repository on ``port``."""
    folder = one.folder / "nginx"
    folder.mkdir()
    file = write_nginx(folder, (ROOT / "docs" / "deploy" / site).read_text(), **replaced)
    one.start(name, NGINX, "-c", str(file), "-p", str(folder))
    wait_for("nginx", lambda: listens(port))


@pytest.fixture(scope="module")
def proxy(tmp_path_factory):
    """Return a federation whose devices connect to the proxy, and whose operator connects to the SuperLink."""
    if NGINX is None:
        pytest.skip("nginx is not installed")
    one = Federation(tmp_path_factory.mktemp("proxy"))
    (one.fleet,) = free_ports(1)
    try:
        app_folder(one.folder / "app")
        one.start_server()
        start_proxy(
            one, "nginx", "nginx.conf", one.fleet,
            **{"8000": str(one.link), "8443": str(one.fleet), "/etc/contrafed": str(one.keys)},
        )  # fmt: skip
        one.start_clients()
        yield one
    finally:
        one.stop()


def post(one, port, path, content=b""):
    """Return the status of a POST with all that a device has: ca.pem."""
    request = urllib.request.Request(f"https://127.0.0.1:{port}{path}", content, {"content-type": "application/protobuf"})
    try:
        context = ssl.create_default_context(cafile=str(one.keys / "ca.pem"))
        return urllib.request.urlopen(request, context=context, timeout=30).status
    except urllib.error.HTTPError as error:
        return error.code


def read_bound_keys(folder):
    """Return the keys of partitions 0, 1, ... in a run's checkpoint."""
    (state,) = (folder / "checkpoints").glob("*/state.json")
    return [client[-1] for client in json.loads(state.read_text())["grid"]["clients"]]


@pytest.mark.slow
def test_three_devices_train_through_the_proxy(tmp_path, proxy):
    how = f"strategy=pmfl {' '.join(SMALL_RUN)} num_rounds=2 checkpoint_every=2"
    with proxy.running(f"{how} output_dir={tmp_path}/devices"):
        summary = wait_for_summary(tmp_path / "devices")
    assert (summary["status"], summary["failures"], summary["rounds"]) == ("finished", 0, 2)
    assert all(read_bound_keys(tmp_path / "devices"))  # the SuperLink demands keys, and the run has bound them


@pytest.mark.slow
def test_a_devices_credentials_are_refused_at_the_control_api(tmp_path, proxy):
    proxy.flwr("ls", "mine")  # the operator is heard on loopback
    for path in CONTROL_PATHS:
        assert post(proxy, proxy.fleet, path) in (400, 403), path
    assert post(proxy, proxy.link, "/v1/control/list-runs") == 200  # which is what the proxy keeps away from devices
    stranger = proxy.environment_of("stranger", proxy.fleet, f'root-certificates = "{proxy.keys}/ca.pem"')
    for words in (("ls", "mine"), ("run", str(proxy.folder / "app"), "mine"), ("supernode", "ls", "mine")):
        asked = subprocess.run([command("flwr"), *words], env=stranger, capture_output=True, text=True, timeout=120)
        assert asked.returncode != 0, words


@pytest.mark.slow
def test_the_fleet_api_asks_for_a_key_and_takes_flowers_chunks(proxy):
    assert post(proxy, proxy.fleet, "/v1/fleet/pull-messages") == 401
    assert post(proxy, proxy.fleet, "/v1/fleet/push-object", bytes(CHUNK_BYTES + 1000)) in (400, 401, 422)


@pytest.mark.parametrize("site", ["nginx.conf", "nginx-compose.conf"])
def test_nginx_takes_the_sites_of_the_repository(tmp_path, site):
    if NGINX is None:
        pytest.skip("nginx is not installed")
    certificate = {"/etc/contrafed": str(tmp_path)} if site == "nginx.conf" else {"superlink:8000": "127.0.0.1:8000"}
    if site == "nginx.conf":
        from contrafed.deploy import certificates

        assert certificates.main([str(tmp_path), "--host", "127.0.0.1"]) == 0
    file = write_nginx(tmp_path, (ROOT / "docs" / "deploy" / site).read_text(), **certificate)
    checked = subprocess.run([NGINX, "-t", "-c", str(file), "-p", str(tmp_path)], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
