"""Causes of a failed restore, special rows before general ones."""

from __future__ import annotations

from typing import Final

from hibernode.criu.known import row

_AGAIN: Final = "the images are damaged; take the checkpoint again"
_SAME_FILES: Final = "put the file back as it was at the dump, or take the checkpoint again"

RESTORE: Final = (
    # Ids, files, addresses.
    row(
        "PidInUse",
        r"Can't fork for (?P<pid>\d+): File exists",
        "pid {pid} of the image is taken by a process that lives here",
        "end process {pid} (the dumped worker itself, or a helper that got its pid), or restore into a "
        "pid namespace of its own",
    ),
    row(
        "SessionClash",
        r"Current (?P<kind>sid|gid) (?P<id>\d+) intersects with",
        "the {kind} {id} that CRIU runs in is also an id in the image",
        "try again: CRIU gets other ids",
    ),
    row(
        "FileMissing",
        r"Can't open file (?P<path>.+) on restore: No such file or directory",
        "/{path}, open or mapped in the image, is absent here",
        _SAME_FILES,
    ),
    row(
        "FileUnreadable",
        r"Can't open file (?P<path>.+) on restore: (?P<error>.+)",
        "/{path}, open or mapped in the image, cannot be opened: {error}",
        _SAME_FILES,
    ),
    row(
        "FileChanged",
        r"File (?P<path>.+) has bad size (?P<found>\d+) \(expect (?P<expected>\d+)\)",
        "/{path} has {found} bytes and had {expected} at the dump",
        _SAME_FILES,
    ),
    row(
        "FileChanged",
        r"File (?P<path>.+) has bad (?P<what>build-ID|mode .+)",
        "/{path} is not the file that was dumped (bad {what})",
        _SAME_FILES,
    ),
    row(
        "LinkRemapMissing",
        r"Can't link (?P<link>\S*link_remap\S*) -> (?P<path>.+): No such file",
        "/{link}, which the dump made for the deleted /{path}, is gone",
        "take the checkpoint again, and keep its link_remap files",
    ),
    row(
        "PidFileExists",
        r"pidfile: Can't open (?P<path>.+): File exists",
        "the pid file {path} exists already",
        "remove it; each restore needs a directory of its own",
    ),
    row(
        "AddressInUse",
        r"Can't (?:bind inet socket|listen on a socket).*: Address already in use",
        "an address that the worker listens on is taken here",
        "end the program that listens there (ss -ltnup), or restore in a network namespace of its own",
    ),
    row(
        "AddressGone",
        r"Can't bind inet socket.*: Cannot assign requested address",
        "a connection's own address is not on this machine",
        "dump with criu.tcp = close, so that connections need not come back",
    ),
    row(
        "TcpReset",
        r"Can't restore not-sent send queue data",
        "one end of a connection sent before the other end was there again, and was reset",
        "restore again; Linux 5.12 or later with nf_tables holds such packets back",
    ),
    row(
        "TcpMismatch",
        r"Connected TCP socket in image|Need to set the --tcp-close",
        "the image was dumped with another setting for TCP",
        "restore with the tcp setting that the manifest names",
    ),
    row(
        "UnixPeerGone",
        r"FATAL: Peer (?P<peer>\d+) unresolved|External socket found in image|Can't connect \d+ socket",
        "the other end of a Unix socket was outside the tree and is not here",
        "close the socket before the worker is ready, then take the checkpoint again",
    ),
    row(
        "TtyMissing",
        r"Don't have tty to inherit session from",
        "the worker was dumped on a terminal, and there is none here",
        "dump it without a terminal (setsid, pipes or files as standard streams)",
    ),
    row(
        "InheritedFd",
        r"Can't fstat inherit fd|Invalid inherit fd argument",
        "what was to take the place of a descriptor is not open",
        "this is a fault of hibernode itself; its log has the command",
    ),
    row(
        "RootMissing",
        r"The --root option is required to restore a mount namespace",
        "the image has a mount namespace of its own and needs a root file system",
        "restore it into a container",
    ),
    # The machine and the images.
    row(
        "CpuMismatch",
        r"CPU (?:instruction )?capabilities do not match|FPU feature required by image"
        r"|CPU xfeatures has unsupported|CPU xsave (?:max )?size mismatch",
        "this CPU lacks features that the dumped worker may use",
        "restore on a machine with the CPU features in the manifest",
    ),
    row(
        "PluginMissing",
        r"Missing required plugin: (?P<plugin>\S+)",
        "the image was dumped with CRIU's {plugin} and needs it again; hibernode uses no plugins",
        "take the checkpoint again with hibernode",
    ),
    row(
        "ImageMagic",
        r"(?:Head magic|Magic) doesn't match for (?P<file>\S+)",
        "{file} is not the image that its name says",
        _AGAIN,
    ),
    row(
        "ImageTruncated",
        r"Read \d+ bytes while \d+ expected (?:from|on) (?P<file>\S+?)(?::|$)",
        "{file} ends too early",
        _AGAIN,
    ),
    row(
        "ImageTruncated",
        r"Unexpected EOF|Img trimmed|Can't read mapping page|Can't read pages data",
        "an image is absent, empty or ends too early",
        _AGAIN,
    ),
    row(
        "ImageCorrupt",
        r"Failed unpacking object \S+ from (?P<file>\S+)",
        "{file} is damaged",
        _AGAIN,
    ),
    row(
        "ImageVersion",
        r"Not supported images version|Too old image, no longer supported|too old criu was used for dump",
        "the images are of a CRIU that this one cannot read",
        "restore with the CRIU version in the manifest",
    ),
    row(
        "TaskDied",
        r"\b(?P<pid>\d+) killed by signal (?P<number>\d+): (?P<name>.+)",
        "task {pid} was killed by signal {number} ({name}) in the middle of its restore",
        "signal 9 is mostly the memory limit; else the images are damaged: hibernode verify ID --digests",
        weak=True,
    ),
)
