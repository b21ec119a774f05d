"""A process that holds one engine and does what its parent asks: engine.py CHANNEL PARENT wheel|LIBRARY ARENA_SIZE.

Requests and answers are one JSON document a line, on the socket whose descriptor is CHANNEL; standard output is the engine's own.
Methods that do not begin with `_` are the requests. Memory is one arena; ranges in it are given as offsets.
"""

import contextlib
import ctypes
import functools
import json
import mmap
import os
import random
import signal
import socket
import sys
import threading
import time
from ctypes import POINTER, Structure, byref, c_char, c_char_p, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p

from metadata_servers import fetch

READ, WRITE = 0, 1
GUARD = 0xA5
GUARD_LENGTH = 64  # bytes watched on both sides of a range that a transfer may change
BLOCK = 1048573  # a prime: a chunk that lands in the wrong place does not match by chance
TRANSFER_LIMIT = 100  # seconds until a transfer that has not ended counts as stuck
STUCK = "stuck"


@functools.lru_cache(maxsize=64)
def random_block(seed, length):
    return random.Random(seed).randbytes(length)


def pattern(seed, length):
    """Random content of any length, in pieces: a block of random bytes again and again."""
    block = random_block(seed, min(length, BLOCK))
    for start in range(0, length, BLOCK):
        piece = min(BLOCK, length - start)
        yield start, block if piece == len(block) else block[:piece]


def run_threads(count, work):
    """Calls work(0), work(1), …, each on a thread of its own, and waits for them."""
    workers = [threading.Thread(target=work, args=(index,)) for index in range(count)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


class Engine:
    """What both kinds share: the arena, and what is built on single transfers."""

    def __init__(self, size):
        self.memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.base = ctypes.addressof(c_char.from_buffer(self.memory))

    # memory

    def fill(self, offset, length, seed):
        for start, piece in pattern(seed, length):
            self.memory[offset + start:offset + start + len(piece)] = piece

    def paint(self, offset, length):
        """Covers a range and its surroundings with the guard byte."""
        before = min(GUARD_LENGTH, offset)
        ctypes.memset(self.base + offset - before, GUARD, before + length + GUARD_LENGTH)

    def check(self, offset, length, seed):
        """Compares a painted range with what `seed` generates, and its surroundings with the guard byte. "" or the first fault."""
        for start, piece in pattern(seed, length):
            found = self.memory[offset + start:offset + start + len(piece)]
            if found != piece:
                first = next(i for i in range(len(piece)) if found[i] != piece[i])
                return f"byte {start + first} of {length} differs"
        if not self._is_guard(max(offset - GUARD_LENGTH, 0), offset):
            return "a byte before the range has changed"
        if not self._is_guard(offset + length, offset + length + GUARD_LENGTH):
            return "a byte after the range has changed"
        return ""

    def untouched(self, offset, length):
        """Whether a painted range and its surroundings are as they were."""
        return self._is_guard(max(offset - GUARD_LENGTH, 0), offset + length + GUARD_LENGTH)

    def _is_guard(self, start, end):
        return self.memory[start:end] == bytes([GUARD]) * (end - start)

    def forget_memory(self):
        """Gives the arena's pages back; they read as zeros afterwards."""
        self.memory.madvise(mmap.MADV_DONTNEED)

    # transfers

    def transfer(self, peer, opcode, local, remote, length, notify=None):
        """Moves one range. Returns {"result": 0 or what the engine said, "seconds": how long it took, "text": why}."""
        start = time.monotonic()
        result = self._transfer(peer, opcode, local, remote, length, notify)
        return {"result": result, "seconds": time.monotonic() - start, "text": self._last_error() if result else ""}

    def batch(self, peer, opcode, items):
        """The same for a batch of (local, remote, length)."""
        start = time.monotonic()
        result = self._batch(peer, opcode, items)
        return {"result": result, "seconds": time.monotonic() - start, "text": self._last_error() if result else ""}

    def storm(self, peer, remote, threads, rounds, length, stride):
        """Threads that write to their part of the peer's memory, read it back and compare. Returns the faults.

        Thread i uses two strides of local memory from 2 * i * stride on, and the peer's memory from remote + i * stride on."""
        faults = []

        def work(index):
            source, sink, target = 2 * index * stride, (2 * index + 1) * stride, remote + index * stride
            for turn in range(rounds):
                seed = index * 100000 + turn
                self.fill(source, length, seed)
                self.paint(sink + GUARD_LENGTH, length)
                for opcode, local in ((WRITE, source), (READ, sink + GUARD_LENGTH)):
                    result = self._transfer(peer, opcode, local, target, length, None)
                    if result:
                        faults.append(f"thread {index}, round {turn}, opcode {opcode}: {result}")
                        return
                fault = self.check(sink + GUARD_LENGTH, length, seed)
                if fault:
                    faults.append(f"thread {index}, round {turn}: {fault}")
                    return

        run_threads(threads, work)
        return faults

    # timing

    def register_each(self, first, count, stride, length):
        """Registers regions one by one. Returns how many have failed."""
        return sum(self.register((first + i) * stride, length) != 0 for i in range(count))

    def time_registrations(self, first, count, stride, length):
        """Registers regions one by one, and unregisters them. Returns the seconds of both."""
        offsets = [(first + i) * stride for i in range(count)]
        begin = time.monotonic()
        failed = self.register_each(first, count, stride, length)
        between = time.monotonic()
        failed += sum(self.unregister(offset) != 0 for offset in offsets)
        end = time.monotonic()
        if failed:
            raise RuntimeError(f"{failed} registrations and unregistrations have failed: {self._last_error()}")
        return [between - begin, end - between]

    def time_transfers(self, peer, opcode, items, seconds):
        """Makes the same synchronous call again and again for so long, once at least. Returns how often, and the seconds it took."""
        begin, count, now = time.monotonic(), 0, 0
        while count == 0 or now < begin + seconds:
            outcome = self._synchronous(peer, opcode, items)
            if outcome:
                raise RuntimeError(f"transfer {count}: {outcome} {self._last_error()}")
            count, now = count + 1, time.monotonic()
        return [count, now - begin]

    # registrations by many threads, as a metadata server sees them

    def register_together(self, threads, each, first, stride, length, uri="", key=""):
        """Threads that register regions one by one: `each` of them a thread, `stride` apart, from `first` on. Returns for each call
        [offset, result, seconds, visible]. If told which key of which server is theirs, they look there for what they have registered,
        at once; visible is None otherwise."""
        calls, ready = [], threading.Barrier(threads)

        def work(index):
            ready.wait()
            for number in range(each):
                offset = first + (index * each + number) * stride
                start = time.monotonic()
                result = self.register(offset, length)
                seconds = time.monotonic() - start
                visible = b'"addr":%d,' % (self.base + offset) in (fetch(uri, key) or b"") if uri and result == 0 else None
                calls.append([offset, result, seconds, visible])

        run_threads(threads, work)
        return calls

    def begin_churn(self, threads, each, first, stride, length):
        """Threads that register and unregister regions, `each` of them a thread, until `end_churn`."""
        self.churn = {"stop": threading.Event(), "calls": 0, "failures": 0, "longest": 0.0, "present": [], "lock": threading.Lock()}
        state = self.churn

        def work(index):
            offsets, present, turn = [first + (index * each + number) * stride for number in range(each)], set(), 0
            while not state["stop"].is_set():
                offset = offsets[turn % each]
                turn += 1
                start = time.monotonic()
                if offset in present:
                    # Whatever it says of the server: it is removed.
                    result = self.unregister(offset)
                    present.discard(offset)
                else:
                    result = self.register(offset, length)
                    if result == 0:
                        present.add(offset)
                with state["lock"]:
                    state["calls"] += 1
                    state["failures"] += result != 0
                    state["longest"] = max(state["longest"], time.monotonic() - start)
                if result != 0:
                    time.sleep(0.01)
            with state["lock"]:
                state["present"] += present

        state["runner"] = threading.Thread(target=run_threads, args=(threads, work))
        state["runner"].start()

    def watch_churn(self):
        """[calls, failed calls, seconds of the longest] so far."""
        with self.churn["lock"]:
            return [self.churn[name] for name in ("calls", "failures", "longest")]

    def end_churn(self):
        """The offsets of the regions that are registered."""
        self.churn["stop"].set()
        self.churn["runner"].join()
        return self.churn["present"]

    # notifications

    def take_when_notified(self, seconds, offset=0, length=0, seed=0):
        """Waits for notifications and, the moment that they are there, checks a range. Returns [messages, fault]."""
        end = time.monotonic() + seconds
        while True:
            messages = self.take_notifications()
            if messages or time.monotonic() > end:
                return [messages, self.check(offset, length, seed) if length else ""]
            time.sleep(0.0005)

    def descriptor_count(self):
        return len(os.listdir("/proc/self/fd"))

    def memory_in_use(self):
        """Resident bytes of this process."""
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * mmap.PAGESIZE


class CppString(Structure):
    """libstdc++'s std::string with its text on the heap. The callee may move it away; what it leaves is not freed here."""

    _fields_ = [("data", c_void_p), ("size", c_size_t), ("capacity", c_size_t), ("unused", c_size_t)]

    def __init__(self, text):
        libc, text = ctypes.CDLL(None), text.encode()
        libc.malloc.argtypes, libc.malloc.restype = [c_size_t], c_void_p
        data = libc.malloc(len(text) + 1)
        ctypes.memmove(data, text + b"\0", len(text) + 1)
        super().__init__(data, len(text), len(text), 0)


# Where the engine is, and the NICs that it uses: RDMA if there are any, else TCP.
HOST = os.environ.get("TE_TEST_HOST", "127.0.0.1")
NICS = [name for name in os.environ.get("TE_TEST_NICS", "").split(",") if name]
# The metadata server, if there is one, and what the engine is called there. Without one it is called by its address.
METADATA = os.environ.get("TE_TEST_METADATA", "P2PHANDSHAKE")
NAME = os.environ.get("TE_TEST_NAME", "")


class Wheel(Engine):
    """The upstream package's engine, through its Python calls."""

    def __init__(self, size):
        super().__init__(size)
        import mooncake.engine as module

        self.module = module
        self.engine = module.TransferEngine()
        if self.engine.initialize(NAME or HOST, METADATA, "rdma" if NICS else "tcp", ",".join(NICS)) != 0:
            raise RuntimeError("the wheel cannot create an engine")

    def port(self):
        return self.engine.get_rpc_port()

    def destroy(self):
        self.engine = None

    def register(self, offset, length):
        return self.engine.register_memory(self.base + offset, length)

    def unregister(self, offset):
        return self.engine.unregister_memory(self.base + offset)

    def register_many(self, count, stride, length):
        return self.engine.batch_register_memory([self.base + i * stride for i in range(count)], [length] * count)

    def take_notifications(self):
        return [[message.name, message.msg] for message in self.engine.get_notifies()]

    def notify(self, peer, name, text):
        """A notification without a transfer: Python has no call for it, the exported C++ member has."""
        native = ctypes.CDLL(self.module.__file__)
        send = getattr(native, "_ZN8mooncake14TransferEngine16sendNotifyByNameENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
                               "NS_16TransferMetadata10NotifyDescE")
        send.argtypes, send.restype = [c_void_p, c_void_p, c_void_p], c_int
        message = (CppString * 2)(CppString(name), CppString(text))
        return send(self.engine.get_engine_ptr(), byref(CppString(peer)), byref(message))

    def probe(self, peer):
        return self.engine.send_probe(peer)

    def first_buffer(self, peer):
        return self.engine.get_first_buffer_address(peer)

    def _transfer(self, peer, opcode, local, remote, length, notify):
        direction = self.module.TransferOpcode.Write if opcode == WRITE else self.module.TransferOpcode.Read
        message = self.module.TransferNotify(*notify) if notify else None
        return self.engine.transfer_sync(peer, self.base + local, remote, length, direction, message)

    def _batch(self, peer, opcode, items):
        call = self.engine.batch_transfer_sync_write if opcode == WRITE else self.engine.batch_transfer_sync_read
        locals_, remotes, lengths = zip(*items)
        return call(peer, [self.base + local for local in locals_], list(remotes), list(lengths))

    def _synchronous(self, peer, opcode, items):
        return self._batch(peer, opcode, items)

    def _last_error(self):
        return ""


class NotifyMessage(Structure):
    _fields_ = [("name", c_char_p), ("msg", c_char_p)]


class Request(Structure):
    _fields_ = [("opcode", c_int), ("source", c_void_p), ("target", c_int32), ("offset", c_uint64), ("length", c_uint64)]


class Status(Structure):
    _fields_ = [("status", c_int), ("bytes", c_uint64)]


class Buffer(Structure):
    _fields_ = [("address", c_void_p), ("length", c_size_t)]


class MemoryRegion(Structure):
    _fields_ = [("struct_size", c_size_t), ("address", c_uint64), ("length", c_uint64), ("access", c_uint32), ("reserved", c_uint32),
                ("location", c_char * 64)]


class NativeRequest(Structure):
    _fields_ = [("opcode", c_uint32), ("reserved", c_uint32), ("local", c_void_p), ("segment", c_uint64), ("remote", c_uint64),
                ("length", c_uint64)]


class NativeOptions(Structure):
    _fields_ = [("struct_size", c_size_t), ("timeout_ms", c_int64), ("stall_timeout_ms", c_int64), ("notify_name", c_char_p),
                ("notify_message", c_char_p)]


WAITING, PENDING, COMPLETED = 0, 1, 4


class Library(Engine):
    """A libtransfer_engine.so: upstream's C functions, and those of te.h that they have no counterpart for."""

    def __init__(self, size, path):
        super().__init__(size)
        lib = self.lib = ctypes.CDLL(path)
        lib.createTransferEngine.argtypes, lib.createTransferEngine.restype = [c_char_p, c_char_p, c_char_p, c_uint64, c_int], c_void_p
        lib.destroyTransferEngine.argtypes = [c_void_p]
        lib.installTransport.argtypes, lib.installTransport.restype = [c_void_p, c_char_p, c_void_p], c_void_p
        lib.getLocalIpAndPort.argtypes = [c_void_p, c_char_p, c_size_t]
        lib.registerLocalMemory.argtypes = [c_void_p, c_void_p, c_size_t, c_char_p, c_int]
        lib.registerLocalMemoryBatch.argtypes = [c_void_p, POINTER(Buffer), c_size_t, c_char_p]
        lib.unregisterLocalMemory.argtypes = [c_void_p, c_void_p]
        lib.openSegment.argtypes, lib.openSegment.restype = [c_void_p, c_char_p], c_int32
        lib.allocateBatchID.argtypes, lib.allocateBatchID.restype = [c_void_p, c_size_t], c_uint64
        lib.submitTransfer.argtypes = [c_void_p, c_uint64, POINTER(Request), c_size_t]
        lib.submitTransferWithNotify.argtypes = [c_void_p, c_uint64, POINTER(Request), c_size_t, NotifyMessage]
        lib.getTransferStatus.argtypes = [c_void_p, c_uint64, c_size_t, POINTER(Status)]
        lib.freeBatchID.argtypes = [c_void_p, c_uint64]
        lib.genNotifyInEngine.argtypes = [c_void_p, c_uint64, NotifyMessage]
        lib.getNotifsFromEngine.argtypes, lib.getNotifsFromEngine.restype = [c_void_p, POINTER(c_int)], POINTER(NotifyMessage)
        lib.freeNotifsMsgBuf.argtypes = [POINTER(NotifyMessage), c_int]
        lib.te_last_error.restype = c_char_p
        self.engine = lib.createTransferEngine(METADATA.encode(), (NAME or HOST).encode(), HOST.encode(), 0, 0)
        protocol, matrix = b"rdma" if NICS else b"tcp", json.dumps({"cpu:0": [NICS, []]}).encode()
        arguments = (c_char_p * 1)(matrix)
        if not self.engine or not lib.installTransport(self.engine, protocol, arguments if NICS else None):
            raise RuntimeError(f"the library cannot create an engine with the {protocol} transport: {self._last_error()}")
        self.segments = {}
        self.segments_lock = threading.Lock()

    def port(self):
        text = ctypes.create_string_buffer(128)
        if self.lib.getLocalIpAndPort(self.engine, text, len(text)) != 0:
            raise RuntimeError("the library does not tell its address")
        return int(text.value.decode().rsplit(":", 1)[1])

    def destroy(self):
        self.lib.destroyTransferEngine(self.engine)

    def register(self, offset, length, remote=True):
        return self.lib.registerLocalMemory(self.engine, self.base + offset, length, b"*", int(remote))

    def unregister(self, offset):
        return self.lib.unregisterLocalMemory(self.engine, self.base + offset)

    def register_many(self, count, stride, length):
        buffers = (Buffer * count)(*((self.base + i * stride, length) for i in range(count)))
        return self.lib.registerLocalMemoryBatch(self.engine, buffers, count, b"*")

    def take_notifications(self):
        count = c_int(0)
        messages = self.lib.getNotifsFromEngine(self.engine, byref(count))
        found = [[messages[i].name.decode(), messages[i].msg.decode()] for i in range(count.value)]
        if messages:
            self.lib.freeNotifsMsgBuf(messages, count)
        return found

    def notify(self, peer, name, text):
        return self.lib.genNotifyInEngine(self.engine, self._segment(peer), NotifyMessage(name.encode(), text.encode()))

    def probe(self, peer):
        return self.lib.te_probe_segment(c_void_p(self.engine), c_uint64(self._segment(peer)))

    def list_segment(self, peer):
        """(address, length) of the regions that a peer publishes."""
        capacity, count = 20000, c_size_t(0)
        regions = (MemoryRegion * capacity)()
        result = self.lib.te_list_segment_memory(c_void_p(self.engine), c_uint64(self._segment(peer)), regions,
                                                 c_size_t(ctypes.sizeof(MemoryRegion)), c_size_t(capacity), byref(count))
        if result != 0:
            raise RuntimeError(f"te_list_segment_memory: {result} {self._last_error()}")
        return [(region.address, region.length) for region in regions[:count.value]]

    def native_batch(self, peer, opcode, items, timeout_ms=0, stall_timeout_ms=0):
        """`batch` by te.h's one call, with its deadlines."""
        requests = (NativeRequest * len(items))(*((opcode, 0, self.base + local, self._segment(peer), remote, length)
                                                  for local, remote, length in items))
        options = NativeOptions(ctypes.sizeof(NativeOptions), timeout_ms, stall_timeout_ms, None, None)
        start = time.monotonic()
        result = self.lib.te_batch_transfer(c_void_p(self.engine), requests, c_size_t(ctypes.sizeof(NativeRequest)),
                                            c_size_t(len(items)), byref(options), None, c_size_t(0))
        return {"result": result, "seconds": time.monotonic() - start, "text": self._last_error() if result else ""}

    def _synchronous(self, peer, opcode, items):
        return self.native_batch(peer, opcode, items)["result"]

    def _segment(self, peer):
        """The segment of a peer: opened once, as callers do, and kept through restarts of the peer."""
        with self.segments_lock:
            if peer not in self.segments:
                segment = self.lib.openSegment(self.engine, peer.encode())
                if segment < 0:
                    raise RuntimeError(f"the library cannot open {peer}: {self._last_error()}")
                self.segments[peer] = segment
            return self.segments[peer]

    def _transfer(self, peer, opcode, local, remote, length, notify):
        return self._submit(peer, opcode, [(local, remote, length)], notify)

    def _batch(self, peer, opcode, items):
        return self._submit(peer, opcode, items, None)

    def _submit(self, peer, opcode, items, notify):
        """0 or what went wrong: the code of a call, or the state of the first task that is not COMPLETED."""
        lib, segment = self.lib, self._segment(peer)
        requests = (Request * len(items))(*((opcode, self.base + local, segment, remote, length) for local, remote, length in items))
        batch = lib.allocateBatchID(self.engine, len(items))
        if notify:
            message = NotifyMessage(notify[0].encode(), notify[1].encode())
            result = lib.submitTransferWithNotify(self.engine, batch, requests, len(items), message)
        else:
            result = lib.submitTransfer(self.engine, batch, requests, len(items))
        if result != 0:
            return f"submit: {result}"
        outcome, status, end = 0, Status(), time.monotonic() + TRANSFER_LIMIT
        for task in range(len(items)):
            pause = 0
            while True:
                result = lib.getTransferStatus(self.engine, batch, task, byref(status))
                if result != 0:
                    return f"status: {result}"
                if status.status not in (WAITING, PENDING):
                    break
                if time.monotonic() > end:
                    return STUCK
                time.sleep(pause)
                pause = min(pause + 0.00002, 0.001)
            if status.status != COMPLETED:
                outcome = outcome or f"state: {status.status}"
            elif status.bytes != items[task][2]:
                outcome = outcome or f"COMPLETED with {status.bytes} of {items[task][2]} bytes"
        result = lib.freeBatchID(self.engine, batch)
        return outcome or (f"free: {result}" if result else 0)

    def _last_error(self):
        text = self.lib.te_last_error()
        return text.decode(errors="replace") if text else ""


def main():
    channel, parent, kind, size = sys.argv[1:]
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != int(parent):
        os._exit(1)
    lines = socket.socket(fileno=int(channel)).makefile("rw")

    def answer(document):
        lines.write(json.dumps(document) + "\n")
        lines.flush()

    try:
        engine = Wheel(int(size)) if kind == "wheel" else Library(int(size), kind)
        answer({"value": [NAME or f"{HOST}:{engine.port()}", engine.port(), engine.base]})
    except Exception as error:
        answer({"error": f"{type(error).__name__}: {error}"})
        os._exit(1)
    with contextlib.suppress(ConnectionError):
        for line in lines:
            request = json.loads(line)
            try:
                answer({"value": getattr(engine, request["method"])(**request["arguments"])})
            except Exception as error:
                answer({"error": f"{type(error).__name__}: {error}"})
    os._exit(0)  # a test's process ends at once: how engines are destroyed is tested elsewhere


if __name__ == "__main__":
    main()
