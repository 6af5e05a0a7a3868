"""Certificates and keys of a deployment."""

from contrafed import keys


def test_keys_are_made_once_and_fit_together(tmp_path, capsys):
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

    assert keys.main([str(tmp_path / "keys"), "--nodes", "1"]) == 2
    assert "--host is missing" in capsys.readouterr().err
    assert not (tmp_path / "keys").exists()
    assert keys.main([str(tmp_path / "keys"), "--host", "fl.example.org", "--host", "192.0.2.7", "--nodes", "2"]) == 0
    folder = tmp_path / "keys"
    authority, server = (x509.load_pem_x509_certificate((folder / f"{name}.pem").read_bytes()) for name in ("ca", "server"))
    server.verify_directly_issued_by(authority)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["fl.example.org", "localhost"]
    assert [str(a) for a in names.get_values_for_type(x509.IPAddress)] == ["192.0.2.7", "127.0.0.1"]
    private = load_ssh_private_key((folder / "node-1").read_bytes(), None)
    assert private.public_key() == load_ssh_public_key((folder / "node-1.pub").read_bytes())
    for name in ("ca.key", "server.key", "node-0", "node-1"):
        assert (folder / name).stat().st_mode & 0o77 == 0
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    assert keys.main([str(folder), "--nodes", "3"]) == 0
    after = {p.name: p.read_bytes() for p in folder.iterdir()}
    assert after.items() >= before.items()
    assert set(after) - set(before) == {"node-2", "node-2.pub"}
    (folder / "ca.key").unlink()
    assert keys.main([str(folder), "--nodes", "4"]) == 2
    assert "ca.key is not" in capsys.readouterr().err
