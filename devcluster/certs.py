"""The cluster's certificate authority, certificates, keys, admin token and kubeconfigs."""

import base64
import datetime
import ipaddress
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from devcluster.settings import API_URL, CONTEXT, NODE_IP, NODES, SERVICE_IP, Settings

LIFETIME = datetime.timedelta(days=3650)
CLOCK_SKEW = datetime.timedelta(hours=1)


@dataclass(frozen=True)
class Identity:
    """A client of the API server (or, ``kubelet-client``, the API server as a client)."""

    name: str
    user: str
    group: str | None = None


IDENTITIES = (
    Identity("kube-controller-manager", "system:kube-controller-manager"),
    Identity("kube-scheduler", "system:kube-scheduler"),
    *(Identity(node.kubelet, f"system:node:{node.name}", "system:nodes") for node in NODES),
    Identity("kube-proxy", "system:kube-proxy"),
    Identity("coredns", "system:coredns"),
    Identity("kubelet-client", "kube-apiserver-kubelet-client"),
)
SERVER_NAMES = (
    "localhost",
    *(node.name for node in NODES),
    "kubernetes",
    "kubernetes.default",
    "kubernetes.default.svc",
    "kubernetes.default.svc.cluster.local",
)
SERVER_ADDRESSES = ("127.0.0.1", NODE_IP, SERVICE_IP)


def kubeconfig(*, ca: bytes, user: dict[str, Any], context: str) -> dict[str, Any]:
    """Return a kubeconfig with one context; ``ca`` is PEM, ``user`` the credentials."""
    authority = base64.b64encode(ca).decode()
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {
                "name": context,
                "cluster": {"server": API_URL, "certificate-authority-data": authority},
            }
        ],
        "users": [{"name": context, "user": user}],
        "contexts": [{"name": context, "context": {"cluster": context, "user": context}}],
        "current-context": context,
    }


def token_line(token: str) -> str:
    """Return the admin's line of the API server's token file."""
    return f'{token},admin,admin,"system:masters"\n'


def admin_token(settings: Settings) -> str:
    """Read the admin's token; the file exists once ``ensure_certificates`` ran."""
    return (settings.pki / "tokens.csv").read_text().split(",", 1)[0]


def write_private(path: Path, data: bytes) -> None:
    """Write a file that only its owner can read, all of it or nothing."""
    new = path.with_name(path.name + ".new")
    new.unlink(missing_ok=True)
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    new.rename(path)


def ensure_certificates(settings: Settings) -> None:
    """Make everything under ``pki`` and the kubeconfigs, once for the life of the state folder."""
    pki = settings.pki
    # written last: after a crash in the middle all of it is made anew
    complete = pki / "complete"
    if complete.exists():
        return
    pki.mkdir(mode=0o700, parents=True, exist_ok=True)
    pki.chmod(0o700)
    authority = _Authority()
    ca = authority.pem
    write_private(pki / "ca.crt", ca)
    write_private(pki / "ca.key", _key_pem(authority.key))
    accounts = ec.generate_private_key(ec.SECP256R1())
    write_private(pki / "service-accounts.key", _key_pem(accounts))
    write_private(pki / "service-accounts.pub", _public_pem(accounts))
    certificate, key = authority.server("kube-apiserver", SERVER_NAMES, SERVER_ADDRESSES)
    write_private(pki / "server.crt", certificate)
    write_private(pki / "server.key", key)
    for identity in IDENTITIES:
        certificate, key = authority.client(identity)
        write_private(pki / f"{identity.name}.crt", certificate)
        write_private(pki / f"{identity.name}.key", key)
        user = {
            "client-certificate": str(pki / f"{identity.name}.crt"),
            "client-key": str(pki / f"{identity.name}.key"),
        }
        config = kubeconfig(ca=ca, user=user, context=CONTEXT)
        write_private(pki / f"{identity.name}.kubeconfig", yaml.safe_dump(config).encode())
    token = secrets.token_urlsafe(32)
    write_private(pki / "tokens.csv", token_line(token).encode())
    admin = kubeconfig(ca=ca, user={"token": token}, context=CONTEXT)
    write_private(settings.kubeconfig, yaml.safe_dump(admin).encode())
    write_private(complete, b"")


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _public_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )


class _Authority:
    """A certificate authority that lives as long as one run."""

    def __init__(self) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "rollout-dev-ca")])
        usage = _key_usage(authority=True)
        certificate = (
            self._builder(self._name, self.key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .sign(self.key, hashes.SHA256())
        )
        self.pem = certificate.public_bytes(serialization.Encoding.PEM)

    def server(
        self, name: str, names: Sequence[str], addresses: Sequence[str]
    ) -> tuple[bytes, bytes]:
        """Return certificate and key (PEM) of a server with these names and addresses."""
        alternatives: list[x509.GeneralName] = [x509.DNSName(name) for name in names]
        alternatives += [x509.IPAddress(ipaddress.ip_address(a)) for a in addresses]
        return self._issue(
            x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]),
            ExtendedKeyUsageOID.SERVER_AUTH,
            x509.SubjectAlternativeName(alternatives),
        )

    def client(self, identity: Identity) -> tuple[bytes, bytes]:
        """Return certificate and key (PEM) of a client."""
        attributes = [x509.NameAttribute(NameOID.COMMON_NAME, identity.user)]
        if identity.group is not None:
            attributes.append(x509.NameAttribute(NameOID.ORGANIZATION_NAME, identity.group))
        return self._issue(x509.Name(attributes), ExtendedKeyUsageOID.CLIENT_AUTH, None)

    def _issue(
        self,
        subject: x509.Name,
        usage: x509.ObjectIdentifier,
        alternatives: x509.SubjectAlternativeName | None,
    ) -> tuple[bytes, bytes]:
        key = ec.generate_private_key(ec.SECP256R1())
        builder = (
            self._builder(subject, key.public_key())
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(authority=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        )
        if alternatives is not None:
            builder = builder.add_extension(alternatives, critical=False)
        certificate = builder.sign(self.key, hashes.SHA256())
        return certificate.public_bytes(serialization.Encoding.PEM), _key_pem(key)

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - CLOCK_SKEW)
            .not_valid_after(now + LIFETIME)
        )


def _key_usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=authority,
        crl_sign=authority,
        encipher_only=False,
        decipher_only=False,
    )
