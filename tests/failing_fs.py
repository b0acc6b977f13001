"""A file system that fails when told to: FUSE, spoken directly. Linux, as root; no libraries.

    with FailingFS(folder, mountpoint) as fs:
        fs.fail("read", "EIO", after=3)

Everything is passed on to `folder` by a process of its own, and files are opened without a page
cache, so that each read of the user is a read of the server. `after` calls are still done right;
`times` of them fail.
"""

import contextlib
import ctypes
import errno
import itertools
import json
import os
import stat
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

MOST = 1 << 17  # bytes of a read or write
DIRECT_IO = 1
HEADER, ANSWER = struct.Struct("<IIQQIIIHH"), struct.Struct("<IiQ")
LIBC = ctypes.CDLL(None, use_errno=True)


def cannot_mount() -> str:
    """Why no such file system can be made here, or ""."""
    if sys.platform != "linux":
        return "FUSE is spoken with Linux only"
    if os.geteuid():
        return "only root may mount"
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR))
    except OSError as e:
        return f"/dev/fuse: {e.strerror}"
    return ""


def mount(source: str, target: str, kind: str, flags: int, options: str) -> None:
    if LIBC.mount(source.encode(), target.encode(), kind.encode(), flags, options.encode()):
        code = ctypes.get_errno()
        raise OSError(code, f"mount: {os.strerror(code)}", target)


class Server:
    """Answers the kernel. Numbers of nodes are handed out as names are looked up, and kept."""

    def __init__(self, folder: str, fd: int):
        self.fd, self.folder = fd, folder
        self.paths = {1: folder}
        self.nodes = {folder: 1}
        self.numbers = itertools.count(2)
        self.lock = threading.Lock()
        self.faults: dict[str, list] = {}  # operation -> [fault, after, times]
        self.counts: dict[str, int] = {}
        self.gone = threading.Event()

    def serve(self) -> None:
        by_number = {
            1: self.lookup, 3: self.getattr, 4: self.setattr, 9: self.mkdir, 10: self.unlink,
            11: self.rmdir, 12: self.rename, 14: self.open, 15: self.read, 16: self.write,
            17: self.statfs, 18: self.release, 20: self.fsync, 25: self.nothing, 26: self.init,
            27: self.nothing_opened, 28: self.readdir, 29: self.nothing, 30: self.nothing,
            34: self.nothing, 35: self.create, 45: self.rename2,
        }  # fmt: skip
        with ThreadPoolExecutor(16) as pool:
            while True:
                try:
                    message = os.read(self.fd, MOST + 4096)
                except OSError as e:
                    if e.errno in (errno.ENOENT, errno.EINTR):  # the caller gave up
                        continue
                    return  # unmounted
                _, opcode, unique, node, *_ = HEADER.unpack_from(message)
                body = message[HEADER.size :]
                if opcode in (2, 42, 36, 38):  # forget, interrupt, destroy: no answer
                    continue
                act = by_number.get(opcode)
                if opcode in (15, 16, 20):
                    pool.submit(self.answer, act, unique, node, body)
                else:
                    self.answer(act, unique, node, body)

    def answer(self, act, unique: int, node: int, body: bytes) -> None:
        out, code = b"", errno.ENOSYS
        if act is not None:
            try:
                out, code = self.faulty(act, node, body), 0
            except OSError as e:
                code = e.errno or errno.EIO
            except KeyError:
                code = errno.ENOENT
        with contextlib.suppress(OSError):  # the caller is gone
            os.write(self.fd, ANSWER.pack(ANSWER.size + len(out), -code, unique) + out)

    def faulty(self, act, node: int, body: bytes) -> bytes:
        with self.lock:
            name = act.__name__
            self.counts[name] = self.counts.get(name, 0) + 1
            fault = self.faults.get(name)
            kind = None
            if fault is not None:
                kind, after, times = fault
                if after > 0:
                    fault[1], kind = after - 1, None
                elif times == 0:
                    kind = None
                else:
                    fault[2] = times - 1
        if kind is None:
            return act(node, body)
        if kind == "short":  # of a read: half of it; the end of the file looks like this as well
            out = act(node, body)
            return out[: max(1, len(out) // 2)]
        if kind == "end":
            return b""
        if kind.startswith("slow"):
            time.sleep(float(kind[4:]))
            return act(node, body)
        if kind == "hang":
            self.gone.wait()
        raise OSError(getattr(errno, kind), "")

    # ---- operations ------------------------------------------------------------------------------

    def init(self, node, body):
        _, _, ahead, _ = struct.unpack_from("<IIII", body)
        out = struct.pack("<IIIIHHIIHHII", 7, 31, ahead, 1 << 5, 16, 12, MOST, 1, 32, 0, 0, 0)
        return out.ljust(64, b"\0")  # 1 << 5: writes may be large

    def node_of(self, path: str) -> int:
        if path not in self.nodes:
            self.nodes[path] = next(self.numbers)
            self.paths[self.nodes[path]] = path
        return self.nodes[path]

    def child(self, node: int, name: bytes) -> str:
        return os.path.join(self.paths[node], os.fsdecode(name.partition(b"\0")[0]))

    def attributes(self, node: int) -> bytes:
        s = os.lstat(self.paths[node])
        second = 10**9
        return struct.pack(
            "<6Q10I", node, s.st_size, s.st_blocks, *(t // second for t in self.times(s)),
            *(t % second for t in self.times(s)), s.st_mode, s.st_nlink, s.st_uid, s.st_gid, 0,
            4096, 0,
        )  # fmt: skip

    @staticmethod
    def times(s):
        return s.st_atime_ns, s.st_mtime_ns, s.st_ctime_ns

    def entry(self, path: str) -> bytes:
        os.lstat(path)
        node = self.node_of(path)
        return struct.pack("<4Q2I", node, 0, 0, 0, 0, 0) + self.attributes(node)

    def lookup(self, node, body):
        return self.entry(self.child(node, body))

    def getattr(self, node, body):
        return struct.pack("<QII", 0, 0, 0) + self.attributes(node)

    def setattr(self, node, body):
        valid, _, _, size, _, atime, mtime, _, ans, mns, _, mode = struct.unpack_from(
            "<IIQQQQQQIIII", body
        )
        path = self.paths[node]
        if valid & 1:
            os.chmod(path, stat.S_IMODE(mode))
        if valid & 8:
            os.truncate(path, size)
        if valid & (16 | 32 | 128 | 256):
            now, old = time.time_ns(), os.stat(path)
            a = now if valid & 128 else atime * 10**9 + ans if valid & 16 else old.st_atime_ns
            m = now if valid & 256 else mtime * 10**9 + mns if valid & 32 else old.st_mtime_ns
            os.utime(path, ns=(a, m))
        return self.getattr(node, body)

    def mkdir(self, node, body):
        path = self.child(node, body[8:])
        os.mkdir(path, struct.unpack_from("<I", body)[0] & 0o777)
        return self.entry(path)

    def forget(self, path: str) -> None:
        self.nodes.pop(path, None)

    def unlink(self, node, body):
        path = self.child(node, body)
        os.unlink(path)
        self.forget(path)
        return b""

    def rmdir(self, node, body):
        path = self.child(node, body)
        os.rmdir(path)
        self.forget(path)
        return b""

    def rename(self, node, body, names_at=8):
        old, new, _ = body[names_at:].split(b"\0", 2)
        old, new = self.child(node, old), self.child(struct.unpack_from("<Q", body)[0], new)
        os.rename(old, new)
        self.forget(new)
        for path in [p for p in self.nodes if p == old or p.startswith(old + "/")]:
            moved = new + path[len(old) :]
            self.nodes[moved] = number = self.nodes.pop(path)
            self.paths[number] = moved
        return b""

    def rename2(self, node, body):
        if struct.unpack_from("<I", body, 8)[0]:
            raise OSError(errno.EINVAL, "")
        return self.rename(node, body, 16)

    def opened(self, fd: int) -> bytes:
        return struct.pack("<QII", fd, DIRECT_IO, 0)

    def open(self, node, body):
        flags = struct.unpack_from("<I", body)[0] & ~(os.O_DIRECT | os.O_CREAT | os.O_EXCL)
        return self.opened(os.open(self.paths[node], flags))

    def create(self, node, body):
        flags, mode = struct.unpack_from("<II", body)
        path = self.child(node, body[16:])
        fd = os.open(path, flags & ~os.O_DIRECT | os.O_CREAT, mode & 0o777)
        return self.entry(path) + self.opened(fd)

    def read(self, node, body):
        fd, offset, size = struct.unpack_from("<QQI", body)
        return os.pread(fd, size, offset)

    def write(self, node, body):
        fd, offset, size = struct.unpack_from("<QQI", body)
        return struct.pack("<II", os.pwrite(fd, body[40 : 40 + size], offset), 0)

    def fsync(self, node, body):
        return b""

    def release(self, node, body):
        os.close(struct.unpack_from("<Q", body)[0])
        return b""

    def nothing(self, node, body):
        return b""

    def nothing_opened(self, node, body):
        return struct.pack("<QII", 0, 0, 0)

    def readdir(self, node, body):
        _, offset, size = struct.unpack_from("<QQI", body)
        out = b""
        names = [".", "..", *sorted(os.listdir(self.paths[node]))]
        for i, name in enumerate(names[offset:], offset + 1):
            data = os.fsencode(name)
            s = os.lstat(os.path.join(self.paths[node], name))
            one = struct.pack("<QQII", s.st_ino, i, len(data), s.st_mode >> 12) + data
            one += b"\0" * (-len(one) % 8)
            if len(out) + len(one) > size:
                break
            out += one
        return out

    def statfs(self, node, body):
        s = os.statvfs(self.folder)
        return struct.pack(
            "<5Q4I24x", s.f_blocks, s.f_bfree, s.f_bavail, s.f_files, s.f_ffree, s.f_bsize,
            s.f_namemax, s.f_frsize, 0,
        )  # fmt: skip


class FailingFS:
    """The mounted file system, seen from the process that tells it to fail."""

    def __init__(self, folder: Path, mountpoint: Path):
        self.folder, self.mountpoint = folder, mountpoint
        mountpoint.mkdir(exist_ok=True)
        self.start()

    def start(self) -> None:
        """Mount; also again, after `vanish`."""
        command = [sys.executable, "-S", __file__, str(self.folder), str(self.mountpoint)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        if self._say({}) is None:
            raise OSError(f"{self.mountpoint} could not be mounted")

    def _say(self, what: dict) -> dict | None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline() or "null")

    def fail(self, operation: str, fault: str, after: int = 0, times: int = -1) -> None:
        """Let calls fail: an errno's name, "short", "end", "slow<seconds>" or "hang"."""
        self._say({operation: [fault, after, times]})

    def heal(self) -> None:
        self._say({"heal": True})

    def count(self, operation: str) -> int:
        """How many calls of this kind there were since the last `heal` or `fail`."""
        return (self._say({}) or {}).get(operation, 0)

    def vanish(self) -> None:
        """Unplug the disk. What is open fails from now on, what is being read as well."""
        self.process.kill()
        self.process.communicate()
        LIBC.umount2(str(self.mountpoint).encode(), 2)  # MNT_DETACH

    def __enter__(self) -> "FailingFS":
        return self

    def __exit__(self, *exc: object) -> None:
        self.vanish()


def main(folder: str, mountpoint: str) -> None:
    fd = os.open("/dev/fuse", os.O_RDWR)
    mount("failing", mountpoint, "fuse", 0, f"fd={fd},rootmode=40000,user_id=0,group_id=0")
    server = Server(folder, fd)
    threading.Thread(target=server.serve, daemon=True).start()
    for line in sys.stdin:
        said = json.loads(line)
        with server.lock:
            print(json.dumps(server.counts), flush=True)
            if said.pop("heal", False):
                server.faults.clear()
                server.counts.clear()
            elif said:
                server.faults.update(said)
                server.counts.clear()
    os._exit(0)  # unmounts: nobody answers any more


if __name__ == "__main__":
    main(*sys.argv[1:])
