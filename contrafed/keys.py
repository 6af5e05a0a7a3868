"""Certificates and keys of a deployment: ``python -m contrafed.keys FOLDER --host SERVER --nodes 3``.

A certificate authority of one's own, the server's certificate signed by it, and a key pair per node, by which the server knows
the node. What is there already stays, so that a node can be added later; delete a file to have it made anew.
"""

import argparse
import datetime
import ipaddress
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from core.errors import UserError

CA, SERVER = "ca", "server"  # ca.pem goes to everyone; ca.key stays with whoever made it
LOOPBACK = ("localhost", "127.0.0.1")  # by which the SuperLink's own helper processes reach it
CLOCK_DAYS = 1  # clocks of devices may be behind by so much


def make_keys(folder: Path, hosts: Sequence[str], nodes: int, days: int) -> list[Path]:
    """Write what ``folder`` lacks of ca.pem, ca.key, server.pem, server.key, node-K and node-K.pub for K < ``nodes``.

    ``hosts`` are the names and addresses by which devices reach the server, ``days`` how long certificates are valid.
    Returns the files made; the private ones can be read by their owner alone. Raises ``UserError``.
    """
    authority, authority_key, server = folder / f"{CA}.pem", folder / f"{CA}.key", folder / f"{SERVER}.pem"
    if days < 1 or nodes < 0:
        raise UserError(f"--days must be at least 1 and --nodes at least 0, got {days} and {nodes}")
    if authority.exists() != authority_key.exists():
        there, gone = (authority, authority_key) if authority.exists() else (authority_key, authority)
        raise UserError(f"{there} is there but {gone.name} is not; put it back, or delete both to begin anew")
    if not server.exists() and not hosts:
        raise UserError("--host is missing: the name or address by which devices reach the server")
    names = [_alternative(host) for host in dict.fromkeys((*hosts, *LOOPBACK))]
    folder.mkdir(parents=True, exist_ok=True)
    made: list[Path] = []
    if not authority.exists():
        key = ec.generate_private_key(ec.SECP384R1())
        name = _name("contrafed CA")
        certificate = _builder(name, name, key.public_key(), days, authority=True)
        certificate = certificate.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        made += _write_pair(authority, authority_key, certificate.sign(key, hashes.SHA384()), key)
    if not server.exists():
        issuer = x509.load_pem_x509_certificate(authority.read_bytes())
        issuer_key = serialization.load_pem_private_key(authority_key.read_bytes(), None)
        assert isinstance(issuer_key, ec.EllipticCurvePrivateKey)
        key = ec.generate_private_key(ec.SECP384R1())
        certificate = (
            _builder(_name(hosts[0]), issuer.subject, key.public_key(), days, authority=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
        )
        signed = certificate.sign(issuer_key, hashes.SHA384())
        made += _write_pair(server, folder / f"{SERVER}.key", signed, key)
    for node in range(nodes):
        private = folder / f"node-{node}"
        if not private.exists():
            key = ec.generate_private_key(ec.SECP384R1())
            _write_private(private, key, serialization.PrivateFormat.OpenSSH)
            public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
            private.with_suffix(".pub").write_bytes(public + b"\n")
            made += [private, private.with_suffix(".pub")]
    return made


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common[:64])])


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError as error:
        raise UserError(f"--host {host} is neither a name nor an address; give it without port") from error


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


def _write_pair(path: Path, key_path: Path, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> list[Path]:
    _write_private(key_path, key, serialization.PrivateFormat.PKCS8)
    path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return [path, key_path]


def _write_private(path: Path, key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> None:
    data = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the keys that the command line asks for; returns the exit status."""
    parser = argparse.ArgumentParser("python -m contrafed.keys", description=(__doc__ or "").partition("\n")[2].strip())
    parser.add_argument("folder", type=Path, help="where the files are, or are made")
    parser.add_argument("--host", action="append", default=[], help="name or address of the server; may be given again")
    parser.add_argument("--nodes", type=int, default=0, help="how many nodes get a key pair (default: 0)")
    parser.add_argument("--days", type=int, default=365, help="how long certificates are valid (default: 365)")
    options = parser.parse_args(arguments)
    try:
        made = make_keys(options.folder, options.host, options.nodes, options.days)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(f"made {path}" for path in made) or "everything is there already")
    return 0


if __name__ == "__main__":
    sys.exit(main())
