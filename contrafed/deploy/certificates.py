"""Make certificates and keys of a deployment: ``python -m contrafed.deploy.certificates FOLDER --host SERVER --clients 3``.

Makes your own certificate authority, the server's certificate signed by it, and a key pair per client, by which the server
recognises it. Existing files are kept, so that a client can be added later. Only a certificate that expires soon is renewed,
with its existing key. Delete a file to have a new one made.
"""

import datetime
import ipaddress
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from contrafed.core.arguments import Parser
from contrafed.core.errors import UserError

CA, SERVER = "ca", "server"  # every device gets ca.pem, and ca.key stays on the machine that made it
LOOPBACK = ("localhost", "127.0.0.1")  # by which the SuperLink's own helper processes reach it
CLOCK_DAYS = 1  # devices' clocks may be behind by this
RENEW_DAYS = 30  # certificates with fewer days left are renewed
MOST_DAYS, LONGEST_HOST = 36_500, 253
LABEL = "[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"  # of a DNS name, whose first label may be *
HOST = re.compile(rf"(\*\.)?{LABEL}(\.{LABEL})*\.?")


class Written(NamedTuple):
    """The files that ``make_keys`` wrote."""

    made: list[Path]
    renewed: list[Path]  # certificates, with the key they had


def make_keys(folder: Path, hosts: Sequence[str], clients: int, days: int, renew: int = RENEW_DAYS) -> Written:
    """Write the missing files of ca.pem, ca.key, server.pem, server.key, client-K and client-K.pub for K < ``clients``.

    ``hosts`` are the names and addresses by which devices reach the server, by default those of its certificate. Certificates
    are valid for ``days``. One with fewer than ``renew`` days left, at most half of ``days``, is renewed with its key. The
    server's is also renewed for other ``hosts`` or a new authority. Private files can be read only by their owner.

    Raises ``UserError`` for wrong arguments, or for files that do not fit each other.
    """
    authority, authority_key, server = folder / f"{CA}.pem", folder / f"{CA}.key", folder / f"{SERVER}.pem"
    if not 1 <= days <= MOST_DAYS or clients < 0 or renew < 0:
        raise UserError(
            f"--days must be in 1..{MOST_DAYS}, --clients and --renew-within at least 0, got {days}, {clients} and {renew}"
        )
    if folder.is_file():
        raise UserError(f"{folder} is a file, no folder")
    if authority.exists() and not authority_key.exists():
        raise UserError(f"{authority} is there but {authority_key.name} is not; put it back, or delete both to make new ones")
    if not server.exists() and not hosts:
        raise UserError("--host is missing: the name or address by which devices reach the server")
    ours = _read(authority).subject if authority.exists() else AUTHORITY
    if server.exists() and _read(server).issuer != ours:
        raise UserError(f"{server} is of another authority than {authority}; move it away to have one made here")
    hosts = [str(_alternative(host).value) for host in hosts]
    _check_pairs(folder, clients)
    folder.mkdir(parents=True, exist_ok=True)
    made, renewed, soon = list[Path](), list[Path](), min(renew, days // 2)
    if not authority_key.exists():
        _write_private(authority_key, ec.generate_private_key(ec.SECP384R1()), serialization.PrivateFormat.PKCS8)
        made.append(authority_key)
    if not authority.exists() or days_left(authority) < soon:
        (renewed if authority.exists() else made).append(authority)
        _write_certificate(authority, _authority(_private(authority_key), days))
    known = _hosts(_read(server)) if server.exists() else []
    hosts = [*dict.fromkeys((*hosts, *LOOPBACK))] if hosts else known
    if not server.exists() or not (folder / f"{SERVER}.key").exists():
        key = ec.generate_private_key(ec.SECP384R1())
        _write_private(folder / f"{SERVER}.key", key, serialization.PrivateFormat.PKCS8)
        _write_certificate(server, _server(authority, authority_key, key.public_key(), hosts, days))
        made += [server, folder / f"{SERVER}.key"]
    elif days_left(server) < soon or hosts != known or not _signed_by(authority, server):
        public = _read(server).public_key()
        assert isinstance(public, ec.EllipticCurvePublicKey)
        _write_certificate(server, _server(authority, authority_key, public, hosts, days))
        renewed.append(server)
    for client in range(clients):
        private, public_file = folder / f"client-{client}", folder / f"client-{client}.pub"
        if not private.exists() and not public_file.exists():  # a private key may be on its device alone
            _write_private(private, ec.generate_private_key(ec.SECP384R1()), serialization.PrivateFormat.OpenSSH)
            made.append(private)
        if not public_file.exists():
            public_file.write_bytes(_format_public(private) + b"\n")
            made.append(public_file)
    return Written(made, renewed)


def _check_pairs(folder: Path, clients: int) -> None:
    """Raise ``UserError`` for a private key that cannot be read, or whose public half is that of another key."""
    for name in (CA, SERVER):
        private, public = folder / f"{name}.key", folder / f"{name}.pem"
        if private.exists():
            own = _private(private).public_key()
            if public.exists() and _read(public).public_key() != own:
                raise _build_pair_error(private, public)
    for client in range(clients):
        private, public = folder / f"client-{client}", folder / f"client-{client}.pub"
        if private.exists():
            own_text = _format_public(private)
            if public.exists() and public.read_bytes().split()[:2] != own_text.split():
                raise _build_pair_error(private, public)


def _format_public(private: Path) -> bytes:
    """Return the public half of a client's private key, as in its file without the line's end. Raises ``UserError``."""
    public = _private(private, serialization.load_ssh_private_key).public_key()
    return public.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)


def _build_pair_error(private: Path, public: Path) -> UserError:
    return UserError(f"{public} is not of the key {private.name}. Fix: put the right one back, or delete both to make new ones")


def days_left(certificate: Path) -> int:
    """Return how many whole days a certificate is still valid, negative after its end. Raises ``UserError``."""
    return (_read(certificate).not_valid_after_utc - datetime.datetime.now(datetime.UTC)).days


def _signed_by(authority: Path, certificate: Path) -> bool:
    """Return whether a certificate was signed with an authority's key, not only in its name."""
    try:
        _read(certificate).verify_directly_issued_by(_read(authority))
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _read(certificate: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(certificate.read_bytes())
    except ValueError as error:
        raise UserError(f"{certificate} is no certificate; delete it to have a new one made") from error


def _private(path: Path, load: Callable[..., Any] = serialization.load_pem_private_key) -> ec.EllipticCurvePrivateKey:
    try:
        key = load(path.read_bytes(), None)
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} is no private key that was made here") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UserError(f"{path} is no private key that was made here: it is not of an elliptic curve")
    return key


def _authority(key: ec.EllipticCurvePrivateKey, days: int) -> x509.Certificate:
    """Return the authority's certificate. It keeps its key, so that earlier signatures stay valid."""
    certificate = _builder(AUTHORITY, AUTHORITY, key.public_key(), days, authority=True)
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    return certificate.add_extension(identifier, critical=False).sign(key, hashes.SHA384())


def _server(
    authority: Path, authority_key: Path, public: ec.EllipticCurvePublicKey, hosts: Sequence[str], days: int
) -> x509.Certificate:
    """Return the server's certificate for ``hosts``."""
    issuer_key = _private(authority_key)
    names = [_alternative(host) for host in hosts]
    certificate = (
        _builder(_name(hosts[0]), _read(authority).subject, public, days, authority=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
    )
    return certificate.sign(issuer_key, hashes.SHA384())


def _hosts(certificate: x509.Certificate) -> list[str]:
    """Return the names and addresses in a certificate, in its order."""
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(name.value) for name in names]


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common[:64])])


AUTHORITY = _name("contrafed CA")


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if len(host) > LONGEST_HOST or not HOST.fullmatch(host):
        raise UserError(f"--host {host[:100]!r} is neither a name nor an address; give it without port")
    return x509.DNSName(host)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int, *, authority: bool
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    usage = dict.fromkeys(
        ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only", "decipher_only"),
        False,
    )
    return (
        x509.CertificateBuilder(issuer, subject, key, x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=CLOCK_DAYS))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=0 if authority else None), critical=True)
        .add_extension(
            x509.KeyUsage(digital_signature=not authority, key_cert_sign=authority, crl_sign=authority, **usage), critical=True
        )
    )


def _write_certificate(path: Path, certificate: x509.Certificate) -> None:
    path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


def _write_private(path: Path, key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> None:
    data = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    path.unlink(missing_ok=True)  # an older file would keep its permissions
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the keys that the command line asks for, and return the exit status."""
    parser = Parser("python -m contrafed.deploy.certificates", description=(__doc__ or "").partition("\n")[2].strip())
    parser.add_argument("folder", type=Path, help="where the files are, or are made")
    parser.add_argument("--host", action="append", default=[], help="name or address of the server; may be given again")
    parser.add_argument("--clients", type=int, default=0, help="how many clients get a key pair (default: 0)")
    parser.add_argument("--days", type=int, default=365, help="how long certificates are valid (default: 365)")
    parser.add_argument(
        "--renew-within", type=int, default=RENEW_DAYS, metavar="DAYS",
        help=f"renew certificates with fewer days left, at most half of --days (default: {RENEW_DAYS})",
    )  # fmt: skip
    try:
        options = parser.parse_args(arguments)
        written = make_keys(options.folder, options.host, options.clients, options.days, options.renew_within)
        lines = [f"made {path}" for path in written.made] + [f"renewed {path}" for path in written.renewed]
        print("\n".join(lines) or "everything is there already")
        for name in (CA, SERVER):
            print(_validity(options.folder / f"{name}.pem"))
        print(f"{SERVER}.pem is for {', '.join(_hosts(_read(options.folder / f'{SERVER}.pem')))}")
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for path in written.renewed:
        server = "the server, to where the SuperLink and a proxy read it, and restart both"
        goes = "the server and every device, which read it when they start" if path.stem == CA else server
        print(f"copy {path.name} to {goes}")
    return 0


def _validity(certificate: Path) -> str:
    until = _read(certificate).not_valid_after_utc
    return f"{certificate.name} is valid until {until:%Y-%m-%d} ({days_left(certificate)} days)"


if __name__ == "__main__":
    sys.exit(main())
