"""Certificates and keys of a deployment."""

import pytest

from contrafed.deploy import certificates


def test_keys_are_made_once_and_fit_together(tmp_path, capsys):
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_ssh_private_key, load_ssh_public_key

    assert certificates.main([str(tmp_path / "keys"), "--clients", "1"]) == 2
    assert "--host is missing" in capsys.readouterr().err
    assert not (tmp_path / "keys").exists()
    assert certificates.main([str(tmp_path / "keys"), "--host", "fl.example.org", "--host", "192.0.2.7", "--clients", "2"]) == 0
    folder = tmp_path / "keys"
    authority, server = (x509.load_pem_x509_certificate((folder / f"{name}.pem").read_bytes()) for name in ("ca", "server"))
    server.verify_directly_issued_by(authority)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["fl.example.org", "localhost"]
    assert [str(a) for a in names.get_values_for_type(x509.IPAddress)] == ["192.0.2.7", "127.0.0.1"]
    private = load_ssh_private_key((folder / "client-1").read_bytes(), None)
    assert private.public_key() == load_ssh_public_key((folder / "client-1.pub").read_bytes())
    for name in ("ca.key", "server.key", "client-0", "client-1"):
        assert (folder / name).stat().st_mode & 0o77 == 0
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    assert certificates.main([str(folder), "--clients", "3"]) == 0
    after = {p.name: p.read_bytes() for p in folder.iterdir()}
    assert after.items() >= before.items()
    assert set(after) - set(before) == {"client-2", "client-2.pub"}
    for name in ("server.key", "client-0.pub", "client-1"):
        (folder / name).unlink()
    assert certificates.main([str(folder), "--clients", "3"]) == 0
    anew = {p.name: p.read_bytes() for p in folder.iterdir()}
    # The private key of client 1 may be on its device alone.
    assert {name for name in after if anew.get(name) != after[name]} == {"server.pem", "server.key", "client-1"}
    (folder / "client-1.pub").unlink()
    assert certificates.main([str(folder), "--clients", "3"]) == 0
    assert (folder / "client-1").exists()
    assert (folder / "client-1.pub").read_bytes() != after["client-1.pub"]
    server = x509.load_pem_x509_certificate(anew["server.pem"])
    assert server.public_key() == load_pem_private_key(anew["server.key"], None).public_key()
    assert server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value == names
    (folder / "ca.key").unlink()
    assert certificates.main([str(folder), "--clients", "4"]) == 2
    assert "ca.key is not" in capsys.readouterr().err


def certificate(path):
    from cryptography import x509

    return x509.load_pem_x509_certificate(path.read_bytes())


def test_what_is_about_to_expire_is_renewed_with_its_key(tmp_path, capsys):
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    assert certificates.main([str(tmp_path), "--host", "fl.example.org", "--clients", "1", "--days", "40"]) == 0
    assert "server.pem is valid until " in capsys.readouterr().out
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert certificates.main([str(tmp_path), "--renew-within", "39"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "everything is there already"
    assert said[1].endswith("(39 days)")
    old = certificate(tmp_path / "server.pem")
    assert certificates.main([str(tmp_path), "--renew-within", "40"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[:2] == [f"renewed {tmp_path}/ca.pem", f"renewed {tmp_path}/server.pem"]
    assert [line.partition(" is valid")[0] for line in said[2:4]] == ["ca.pem", "server.pem"]
    assert all(line.endswith("(364 days)") for line in said[2:4])
    assert said[4] == "server.pem is for fl.example.org, localhost, 127.0.0.1"
    assert said[5] == "copy ca.pem to the server and every device, which read it when they start"
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert {name for name in after if after[name] != before[name]} == {"ca.pem", "server.pem"}
    authority, server = certificate(tmp_path / "ca.pem"), certificate(tmp_path / "server.pem")
    server.verify_directly_issued_by(authority)
    # A device that has the new authority's certificate still trusts a server that has not got its own yet.
    old.verify_directly_issued_by(authority)
    assert load_pem_private_key(after["server.key"], None).public_key() == server.public_key()
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["fl.example.org", "localhost"]
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1"]


def test_a_renewed_certificate_takes_the_names_that_are_given(tmp_path):
    from cryptography import x509

    assert certificates.main([str(tmp_path), "--host", "old.example.org", "--days", "2"]) == 0
    written = certificates.make_keys(tmp_path, ["new.example.org"], 0, 365)
    assert ([path.name for path in written.renewed], written.made) == (["ca.pem", "server.pem"], [])
    names = certificate(tmp_path / "server.pem").extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["new.example.org", "localhost"]


@pytest.mark.parametrize("again", [("--host", "a.example"), ("--host", "A.B", "--host", "2001:db8:0:0::7"), ()])
def test_another_host_has_the_server_certificate_made_for_it(tmp_path, capsys, again):
    first = ("--host", "a.example")
    assert certificates.main([str(tmp_path), *first]) == 0
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for _ in range(2):
        assert certificates.main([str(tmp_path), *again]) == 0
    changed = {path.name for path in tmp_path.iterdir() if path.read_bytes() != before[path.name]}
    other = again not in (first, ())
    assert changed == ({"server.pem"} if other else set())
    out = capsys.readouterr().out.splitlines()
    assert out[-1].startswith("server.pem is for " + ("A.B, 2001:db8::7, " if other else "a.example, "))
    assert ("copy server.pem to the server, to where the SuperLink and a proxy read it, and restart both" in out) == other


@pytest.mark.parametrize(
    "wrong",
    [
        ("--host", "fl.example:8000"),
        ("--host", ""),
        ("--host", "a b"),
        ("--host", "x" * 64),
        ("--days", "99999999"),
        ("--days", "x"),
        ("--client", "3"),
    ],
)
def test_what_no_certificate_can_say_leaves_nothing(tmp_path, capsys, wrong):
    assert certificates.main([str(tmp_path / "keys"), "--host", "a.example", *wrong]) == 2
    error = capsys.readouterr().err
    assert error.startswith(("error: --", "error: argument --", "error: unrecognized arguments: --client 3"))
    assert error.count("\n") == 1
    assert not (tmp_path / "keys").exists()
    (tmp_path / "keys").write_text("")
    assert certificates.main([str(tmp_path / "keys"), "--host", "a.example"]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path}/keys is a file, no folder\n"


def test_a_key_that_is_made_anew_is_for_its_owner_alone(tmp_path):
    assert certificates.main([str(tmp_path), "--host", "a.example"]) == 0
    (tmp_path / "server.key").chmod(0o644)
    (tmp_path / "server.pem").unlink()
    assert certificates.main([str(tmp_path), "--host", "a.example"]) == 0
    assert (tmp_path / "server.key").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("name", ["ca.key", "server.key", "client-0"])
@pytest.mark.parametrize("content", ["", "another"])
def test_a_private_key_that_does_not_fit_is_named_and_left(tmp_path, capsys, name, content):
    assert certificates.main([str(tmp_path), "--host", "a.example", "--clients", "1"]) == 0
    if content == "another":
        assert certificates.main([str(tmp_path / "more"), "--host", "a.example", "--clients", "1"]) == 0
        content = (tmp_path / "more" / name).read_text()
    (tmp_path / name).write_text(content)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    capsys.readouterr()
    assert certificates.main([str(tmp_path), "--clients", "2"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"{name}" in error
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


def test_an_authority_whose_certificate_is_lost_signs_it_anew(tmp_path):
    assert certificates.main([str(tmp_path), "--host", "a.example"]) == 0
    server, key = certificate(tmp_path / "server.pem"), (tmp_path / "ca.key").read_bytes()
    (tmp_path / "ca.pem").unlink()
    assert certificates.main([str(tmp_path)]) == 0
    assert (tmp_path / "ca.key").read_bytes() == key
    server.verify_directly_issued_by(certificate(tmp_path / "ca.pem"))


@pytest.mark.parametrize("other", [True, False])
def test_an_authority_begun_anew_signs_the_servers_certificate(tmp_path, capsys, other):
    assert certificates.main([str(tmp_path), "--host", "a.example"]) == 0
    for name in ("ca.pem", "ca.key"):
        (tmp_path / name).unlink()
    key = (tmp_path / "server.key").read_bytes()
    assert certificates.main([str(tmp_path), *(("--host", "a.example") if other else ())]) == 0
    certificate(tmp_path / "server.pem").verify_directly_issued_by(certificate(tmp_path / "ca.pem"))
    assert (tmp_path / "server.key").read_bytes() == key
    out = capsys.readouterr().out
    assert f"renewed {tmp_path}/server.pem" in out
    assert "copy server.pem to the server, to where the SuperLink and a proxy read it, and restart both" in out


def test_a_certificate_of_another_authority_is_left_alone(tmp_path, capsys):
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    assert certificates.main([str(tmp_path), "--host", "a.example"]) == 0
    key, name = ec.generate_private_key(ec.SECP384R1()), certificates._name("another authority")
    other = certificates._builder(name, name, key.public_key(), 90, authority=False).sign(key, hashes.SHA384())
    (tmp_path / "server.pem").write_bytes(other.public_bytes(serialization.Encoding.PEM))
    for gone in ((), ("ca.pem", "ca.key")):
        for name in gone:
            (tmp_path / name).unlink()
        before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        capsys.readouterr()
        assert certificates.main([str(tmp_path), "--host", "b.example", "--clients", "2"]) == 2
        assert "server.pem is of another authority than" in capsys.readouterr().err
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_files_that_are_no_certificates_are_named(tmp_path, capsys):
    assert certificates.main([str(tmp_path), "--host", "fl.example.org"]) == 0
    (tmp_path / "server.pem").write_text("nonsense")
    assert certificates.main([str(tmp_path)]) == 2
    assert f"error: {tmp_path}/server.pem is no certificate" in capsys.readouterr().err
    assert certificates.main([str(tmp_path), "--renew-within", "-1"]) == 2
