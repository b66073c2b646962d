"""Packs folders as layers and layers as an OCI image, without Docker: the same input gives the same bytes.

``oci.py layer FOLDER BLOB`` writes BLOB (tar, gzip) and BLOB.json beside it; ``oci.py image NAME DOCKERFILE
OUT BLOB...`` writes the archive that ``ctr image import``, ``skopeo`` and ``docker load`` take. What the
image runs stands in the last stage of the Dockerfile, and nowhere else.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import platform
import re
import shlex
import subprocess
import tarfile
import zlib
from pathlib import Path
from typing import Any

EPOCH = 315_532_800
"""The time of every file: 1980 began, which is as early as a zip file can tell."""
GZIP = 31
"""zlib's window bits for a gzip header without name and time."""
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
MEDIA = "application/vnd.oci.image"


def layer(folder: Path, blob: Path) -> None:
    """Pack a folder: sorted, root's, of one time."""
    tar = [
        "tar", "-c", "--format=pax", "--pax-option=delete=atime,delete=ctime", "--sort=name",
        f"--mtime=@{EPOCH}", "--owner=0", "--group=0", "--numeric-owner", "-C", str(folder), ".",
    ]  # fmt: skip
    plain, packed = hashlib.sha256(), hashlib.sha256()
    squeeze = zlib.compressobj(6, zlib.DEFLATED, GZIP)
    size = 0
    with subprocess.Popen(tar, stdout=subprocess.PIPE) as process, blob.open("wb") as out:
        assert process.stdout
        while True:
            chunk = process.stdout.read(1 << 20)
            plain.update(chunk)
            part = squeeze.compress(chunk) if chunk else squeeze.flush()
            packed.update(part)
            size += out.write(part)
            if not chunk:
                break
    if process.returncode != 0:
        raise SystemExit(f"oci: tar of {folder} failed with {process.returncode}")
    about = {"digest": packed.hexdigest(), "diff_id": plain.hexdigest(), "size": size}
    blob.with_name(f"{blob.name}.json").write_text(json.dumps(about))


def settings(dockerfile: Path) -> dict[str, Any]:
    """Read what a container of the image gets from the last stage of a Dockerfile."""
    last = re.split(r"(?m)^FROM ", dockerfile.read_text())[-1]
    found: dict[str, Any] = {"Env": [], "Labels": {}}
    for word, rest in re.findall(r"(?m)^(ENV|LABEL|ENTRYPOINT|CMD|USER|WORKDIR) (.+)$", last):
        if word in ("ENTRYPOINT", "CMD"):
            found[word.capitalize()] = json.loads(rest)
        elif word in ("ENV", "LABEL"):
            (pair,) = shlex.split(rest)
            name, _, value = pair.partition("=")
            if word == "ENV":
                found["Env"].append(f"{name}={value}")
            else:
                found["Labels"][name] = value
        else:
            raise SystemExit(f"oci: {dockerfile}: {word} is not understood here")
    return found


def image(name: str, dockerfile: Path, out: Path, blobs: list[Path]) -> None:
    """Write an archive of one image for this machine's architecture."""
    layers = [json.loads(blob.with_name(f"{blob.name}.json").read_text()) for blob in blobs]
    config = {
        "architecture": ARCHITECTURES.get(platform.machine(), platform.machine()),
        "os": "linux",
        "config": settings(dockerfile),
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{each['diff_id']}" for each in layers]},
    }
    with tarfile.open(out, "w", format=tarfile.PAX_FORMAT) as archive:

        def add(path: str, data: bytes) -> None:
            header = tarfile.TarInfo(path)
            header.size, header.mode, header.mtime = len(data), 0o644, EPOCH
            archive.addfile(header, io.BytesIO(data))

        def add_json(value: object, media: str) -> dict[str, Any]:
            data = json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
            digest = hashlib.sha256(data).hexdigest()
            add(f"blobs/sha256/{digest}", data)
            return {"mediaType": f"{MEDIA}.{media}", "digest": f"sha256:{digest}", "size": len(data)}

        def add_layer(blob: Path, about: dict[str, Any]) -> dict[str, Any]:
            header = tarfile.TarInfo(f"blobs/sha256/{about['digest']}")
            header.size, header.mode, header.mtime = about["size"], 0o644, EPOCH
            with blob.open("rb") as data:
                archive.addfile(header, data)
            media = f"{MEDIA}.layer.v1.tar+gzip"
            return {"mediaType": media, "digest": f"sha256:{about['digest']}", "size": about["size"]}

        descriptors = [add_layer(*pair) for pair in zip(blobs, layers, strict=True)]
        manifest = {
            "schemaVersion": 2,
            "mediaType": f"{MEDIA}.manifest.v1+json",
            "config": add_json(config, "config.v1+json"),
            "layers": descriptors,
        }
        top = add_json(manifest, "manifest.v1+json")
        # containerd takes the whole name, others the tag.
        top["annotations"] = {
            "io.containerd.image.name": name,
            "org.opencontainers.image.ref.name": name.rpartition(":")[2],
        }
        index = {"schemaVersion": 2, "mediaType": f"{MEDIA}.index.v1+json", "manifests": [top]}
        add("oci-layout", b'{"imageLayoutVersion":"1.0.0"}')
        add("index.json", json.dumps(index, sort_keys=True).encode())


def main() -> None:
    """Do what the arguments say."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, dest="command")
    one = commands.add_parser("layer")
    one.add_argument("folder", type=Path)
    one.add_argument("blob", type=Path)
    whole = commands.add_parser("image")
    whole.add_argument("name")
    whole.add_argument("dockerfile", type=Path)
    whole.add_argument("out", type=Path)
    whole.add_argument("blobs", type=Path, nargs="+")
    args = vars(parser.parse_args())
    {"layer": layer, "image": image}[args.pop("command")](**args)


if __name__ == "__main__":
    os.umask(0o022)
    main()
