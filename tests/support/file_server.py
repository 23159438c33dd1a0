"""Real HTTP servers on the loopback for sources behind URLs: ranges, TLS, scripted faults, and as
much of the APIs of the Hugging Face Hub and of Google Cloud Storage as clients use to read.
"""

import datetime
import hashlib
import ipaddress
import json
import re
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

Fault = Callable[["Handler", bytes], bool]
"""Answers a request for these bytes in its own way; False leaves it to the server."""


@dataclass
class Seen:
    path: str
    query: str
    headers: dict[str, str]


@dataclass
class FileServer:
    """``files`` by path; each request for one takes the next of its ``faults``."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    faults: dict[str, list[Fault]] = field(default_factory=dict)
    always: dict[str, Fault] = field(default_factory=dict)
    seen: list[Seen] = field(default_factory=list)
    sent: int = 0
    """Bytes of bodies."""
    tags: bool = True
    wanted_token: str = ""
    """Without this one everything is forbidden."""
    release: threading.Event = field(default_factory=threading.Event)
    """Lets answers go on that stall."""
    commit: str = "c0ffee" * 6 + "abcd"

    def publish(self, prefix: str, folder: Path) -> str:
        """Serve a folder's files below a path; its URL."""
        for file in folder.iterdir():
            self.files[f"/{prefix}/{file.name}"] = file.read_bytes()
        return f"{self.url}/{prefix}"

    def requests(self, name: str) -> list[Seen]:
        return [seen for seen in self.seen if seen.path.endswith("/" + name)]


def status(code: int, **headers: str) -> Fault:
    def fault(handler: "Handler", _: bytes) -> bool:
        handler.answer(code, b"no", {k.replace("_", "-"): v for k, v in headers.items()})
        return True

    return fault


def cut_after(count: int) -> Fault:
    """The connection dies in the middle of the body."""

    def fault(handler: "Handler", content: bytes) -> bool:
        start, stop = handler.asked(content)
        handler.head(206, stop - start, handler.range_headers(content, start, stop))
        handler.body(content[start : start + count])
        handler.close_connection = True
        return True

    return fault


def stall_after(count: int) -> Fault:
    def fault(handler: "Handler", content: bytes) -> bool:
        start, stop = handler.asked(content)
        handler.head(206, stop - start, handler.range_headers(content, start, stop))
        handler.body(content[start : start + count])
        handler.wfile.flush()
        handler.served.release.wait(60)
        handler.close_connection = True
        return True

    return fault


def no_ranges(handler: "Handler", content: bytes) -> bool:
    handler.answer(200, content, {"ETag": '"x"'})
    return True


def compressed(handler: "Handler", content: bytes) -> bool:
    start, stop = handler.asked(content)
    headers = handler.range_headers(content, start, stop) | {"Content-Encoding": "gzip"}
    handler.answer(206, content[start:stop], headers)
    return True


def other_range(handler: "Handler", content: bytes) -> bool:
    start, stop = handler.asked(content)
    headers = handler.range_headers(content, start + 1, stop + 1)
    handler.answer(206, content[start:stop], headers)
    return True


def wrong_bytes(handler: "Handler", content: bytes) -> bool:
    """The right headers, one bit flipped at the end."""
    start, stop = handler.asked(content)
    part = content[start : stop - 1] + bytes([content[stop - 1] ^ 1])
    handler.answer(206, part, handler.range_headers(content, start, stop))
    return True


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    served: FileServer

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        path, served = unquote(parts.path), self.served
        served.seen.append(Seen(path, parts.query, dict(self.headers)))
        if served.wanted_token and self.headers.get("Authorization") != served.wanted_token:
            self.answer(403, b"no")
        elif path.startswith("/api/models/"):
            self._hub(path)
        elif path.startswith(("/storage/v1/b/", "/download/storage/v1/b/")):
            self._bucket(path, parse_qs(parts.query))
        else:
            self._file(path.replace(f"/resolve/{served.commit}/", "/"))

    do_HEAD = do_GET

    def _file(self, path: str) -> None:
        content = self.served.files.get(path)
        faults = self.served.faults.get(path)
        fault = faults.pop(0) if faults else self.served.always.get(path)
        if fault and fault(self, content or b""):
            return
        if content is None:
            self.answer(404, b"no such file")
            return
        if "Range" not in self.headers:
            self.answer(200, content, {"ETag": etag(content)})
            return
        start, stop = self.asked(content)
        if start >= len(content):
            self.answer(416, b"", {"Content-Range": f"bytes */{len(content)}"})
            return
        self.answer(206, content[start:stop], self.range_headers(content, start, stop))

    def _hub(self, path: str) -> None:
        found = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path)
        assert found
        prefix = f"/{found[1]}/"
        files = {
            p.removeprefix(prefix): c for p, c in self.served.files.items() if p.startswith(prefix)
        }
        if not files:
            self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif found[2] not in (None, "main", "step-1", "refs/pr/1"):
            self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        else:
            siblings = [
                {"rfilename": name, "size": len(c), "blobId": "0", "lfs": lfs(name, c)}
                for name, c in files.items()
            ]
            document = {"_id": "0", "id": found[1], "sha": self.served.commit, "siblings": siblings}
            self.answer(200, json.dumps(document).encode(), {"Content-Type": "application/json"})

    def _bucket(self, path: str, query: dict[str, list[str]]) -> None:
        found = re.fullmatch(r"(/download)?/storage/v1/b/([^/]+)/o(?:/(.+))?", path)
        assert found
        bucket, name = found[2], found[3]
        if name is None:
            prefix = query.get("prefix", [""])[0]
            names = [
                p.removeprefix(f"/{bucket}/")
                for p in self.served.files
                if p.startswith(f"/{bucket}/{prefix}")
            ]
            items = [self._object(bucket, n) for n in names if "/" not in n.removeprefix(prefix)]
            self.answer(
                200, json.dumps({"items": items}).encode(), {"Content-Type": "application/json"}
            )
        elif f"/{bucket}/{name}" not in self.served.files:
            self.answer(404, b"{}")
        elif found[1] or query.get("alt") == ["media"]:
            self._file(f"/{bucket}/{name}")
        else:
            body = json.dumps(self._object(bucket, name)).encode()
            self.answer(200, body, {"Content-Type": "application/json"})

    def _object(self, bucket: str, name: str) -> dict[str, str]:
        content = self.served.files[f"/{bucket}/{name}"]
        return {
            "kind": "storage#object", "bucket": bucket, "name": name, "size": str(len(content)),
            "etag": etag(content), "generation": str(int(sha256(content)[:8], 16)),
            "updated": "2026-01-01T00:00:00Z", "timeCreated": "2026-01-01T00:00:00Z",
            "mediaLink": f"{self.served.url}/download/storage/v1/b/{bucket}/o/{name}?alt=media",
        }  # fmt: skip

    def asked(self, content: bytes) -> tuple[int, int]:
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"])
        assert found
        return int(found[1]), min(int(found[2]) + 1, len(content))

    def range_headers(self, content: bytes, start: int, stop: int) -> dict[str, str]:
        tag = {"ETag": etag(content)} if self.served.tags else {}
        return {"Content-Range": f"bytes {start}-{stop - 1}/{len(content)}"} | tag

    def answer(self, code: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.head(code, len(content), headers or {})
        if self.command != "HEAD":
            self.body(content)

    def head(self, code: int, length: int, headers: dict[str, str]) -> None:
        self.send_response(code)
        for name, value in ({"Content-Length": str(length)} | headers).items():
            self.send_header(name, value)
        self.end_headers()

    def body(self, content: bytes) -> None:
        self.served.sent += len(content)
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def etag(content: bytes) -> str:
    return f'"{sha256(content)[:16]}"'


def lfs(name: str, content: bytes) -> dict[str, object] | None:
    if not name.endswith(".safetensors"):
        return None
    return {"sha256": sha256(content), "size": len(content), "pointerSize": 130}


class _Quiet(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Clients that go away are what the tests are about."""


@contextmanager
def file_server(tls: Path | None = None) -> Iterator[FileServer]:
    """A server; ``tls`` is a folder for its certificate, whose authority is ``ca.pem`` there."""
    served = FileServer()
    server = _Quiet(("127.0.0.1", 0), type("Bound", (Handler,), {"served": served}))
    if tls is not None:
        make_certificates(tls)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tls / "server.pem")
        server.socket = context.wrap_socket(server.socket, server_side=True)
    served.url = f"http{'s' if tls else ''}://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield served
    finally:
        served.release.set()
        server.shutdown()
        thread.join()
        server.server_close()


def make_certificates(folder: Path) -> None:
    """``ca.pem`` and ``server.pem`` (key and certificate for 127.0.0.1)."""
    now = datetime.datetime.now(datetime.UTC)
    ca_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    ca_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tests")])

    def build(name: x509.Name, public: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(ca_name)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
        )

    subject = x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key())
    usage = x509.KeyUsage(
        digital_signature=True, key_cert_sign=True, crl_sign=True, content_commitment=False,
        key_encipherment=False, data_encipherment=False, key_agreement=False,
        encipher_only=False, decipher_only=False,
    )  # fmt: skip
    ca = (
        build(ca_name, ca_key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(subject, critical=False)
        .add_extension(usage, critical=True)
        .sign(ca_key, hashes.SHA256())
    )
    alternative = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    issuer = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(subject)
    leaf = (
        build(x509.Name([]), key.public_key())
        .add_extension(alternative, critical=True)
        .add_extension(issuer, critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    (folder / "ca.pem").write_bytes(ca.public_bytes(pem))
    (folder / "server.pem").write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        + leaf.public_bytes(pem)
    )
