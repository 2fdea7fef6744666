"""A hub on the loopback: it lists repositories and sends their files, like the real one."""

import hashlib
import json
from urllib.parse import parse_qs, unquote, urlsplit

from tests.edgeinfer.download.hostile_server import HostileServer, Request, serve_file

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub(HostileServer):
    """`files`: the files of each repository. Other paths get the response of `refuse`."""

    def __init__(self) -> None:
        super().__init__()
        self.files: dict[str, dict[str, bytes]] = {}
        self.refuse: tuple[int, str] = (404, "RepoNotFound")
        """Status and X-Error-Code for missing repositories."""
        self.default = respond

    def put(self, repository: str, name: str, content: bytes) -> None:
        self.files.setdefault(repository, {})[name] = content

    def content_of(self, path: str) -> bytes:
        repository, _, rest = unquote(urlsplit(path).path).strip("/").partition("/resolve/")
        return self.files[repository][rest.partition("/")[2]]

    def fetched(self) -> list[str]:
        """The requested files, in order."""
        return [path.rpartition("/")[2] for path, _ in self.seen if "/resolve/" in path]

    def listing(self, repository: str) -> bytes:
        siblings = [
            {
                "rfilename": name,
                "size": len(content),
                "blobId": "0",
                "lfs": {
                    "size": len(content),
                    "sha256": hashlib.sha256(content).hexdigest(),
                    "pointerSize": 134,
                },
            }
            for name, content in self.files[repository].items()
        ]
        return json.dumps({"id": repository, "sha": COMMIT, "siblings": siblings}).encode()


def respond(request: Request) -> None:
    hub = request.server
    assert isinstance(hub, FakeHub)
    url = urlsplit(request.path)
    repository = "/".join(url.path.removeprefix("/api/models").strip("/").split("/")[:2])
    if repository not in hub.files:
        code, why = hub.refuse
        request.begin(code, 0, X_Error_Code=why, X_Error_Message="so it is")
    elif url.path.startswith("/api/models/"):
        assert parse_qs(url.query)["blobs"] == ["True"] or parse_qs(url.query)["blobs"] == ["true"]
        body = hub.listing(repository)
        request.begin(200, len(body), Content_Type="application/json")
        request.wfile.write(body)
    else:
        assert f"/resolve/{COMMIT}/" in url.path
        serve_file(request)
