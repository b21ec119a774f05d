"""An engine of Mooncake's package for `te bench register --metadata` and `te bench sweep`: URI NAME BYTES STRIDE REGION. Requests and
answers are JSON lines."""

import ctypes
import json
import mmap
import os
import statistics
import sys
import threading
import time

uri, name, size, stride, region = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
# Standard output is for answers; what the engine prints goes to standard error.
answers = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)


class String(ctypes.Structure):
    """libstdc++'s std::string, read only, with its text elsewhere."""

    _fields_ = [("data", ctypes.c_char_p), ("size", ctypes.c_size_t), ("capacity", ctypes.c_size_t), ("unused", ctypes.c_size_t)]


def answer(clock=0.0, processor=0.0, error=None, **more):
    print(json.dumps({"clock": clock, "processor": processor, "error": error, **more}), file=answers)


def register(index, publish):
    return register_member(engine.get_engine_ptr(), base + index * stride, region, ctypes.byref(location), True, publish)


def unregister(index, publish):
    return unregister_member(engine.get_engine_ptr(), base + index * stride, publish)


def call(operation):
    """Seconds on the clock and of processor time."""
    member = register if operation["is_registering"] else unregister
    calls, failures = operation["calls"], []
    ready = threading.Barrier(operation["callers"] + 1)

    def work(caller):
        for index in range(regions + caller * calls, regions + (caller + 1) * calls):
            if member(index, operation["is_published"]) != 0:
                failures.append(index)

    def wait_and_work(caller):
        ready.wait()
        work(caller)

    if operation["callers"] == 1:
        clock, processor = time.perf_counter(), time.process_time()
        work(0)
        processor, clock = time.process_time() - processor, time.perf_counter() - clock
    else:
        callers = [threading.Thread(target=wait_and_work, args=(caller,)) for caller in range(operation["callers"])]
        for caller in callers:
            caller.start()
        clock, processor = time.perf_counter(), time.process_time()
        ready.wait()
        for caller in callers:
            caller.join()
        processor, clock = time.process_time() - processor, time.perf_counter() - clock
    if failures:
        raise RuntimeError(f"{len(failures)} calls have failed")
    return clock, processor


def transfer(segment, remote, operation, size, batch, threads, seconds):
    """The median of the seconds that a call takes, and MB/s of all threads. Each makes one call at least, after one that connects."""
    opcode = module.TransferOpcode.Read if operation == "read" else module.TransferOpcode.Write
    places, times, spans, failures = len(memory) // size, [], [], []
    ready = threading.Barrier(threads)

    def work(thread):
        offsets = [(thread * batch + index) % places * size for index in range(batch)]
        local, there, lengths = [base + offset for offset in offsets], [remote + offset for offset in offsets], [size] * batch
        if batch == 1:
            move = lambda: engine.transfer_sync(segment, local[0], there[0], size, opcode)
        else:
            move = lambda: engine.batch_transfer_sync(segment, local, there, lengths, opcode)
        failed = move() != 0
        ready.wait()
        begin = now = time.perf_counter()
        while not failed:
            before = now
            failed, now = move() != 0, time.perf_counter()
            times.append(now - before)
            if now >= begin + seconds:
                break
        spans.append((begin, now))
        failures.extend([thread] * failed)

    workers = [threading.Thread(target=work, args=(thread,)) for thread in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    elapsed = max(end for _, end in spans) - min(begin for begin, _ in spans)
    if failures:
        raise RuntimeError(f"transfers of {len(failures)} threads have failed")
    return statistics.median(times), len(times) * batch * size / elapsed / 1e6


def compare(value, length):
    if memory[:length].count(value) != length:
        raise RuntimeError(f"WRONG CONTENT: of {length} bytes, not all are those that were sent")


try:
    import mooncake.engine as module

    engine = module.TransferEngine()
    if engine.initialize(name, uri, "tcp", "") != 0:
        raise RuntimeError("the engine cannot be made")
    # By the members that the extension exports: Python's own calls publish always, and may let one in at a time.
    native = ctypes.CDLL(module.__file__)
    register_member = native._ZN8mooncake14TransferEngine19registerLocalMemoryEPvmRKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEEbb
    register_member.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_bool, ctypes.c_bool]
    unregister_member = native._ZN8mooncake14TransferEngine21unregisterLocalMemoryEPvb
    unregister_member.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_bool]
    location = String(b"cpu:0", 5, 5, 0)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    regions = 0
    answer(segment=f"{name}:{engine.get_rpc_port()}", base=base)
    for line in sys.stdin:
        request = json.loads(line)
        action = request.pop("do")
        if action == "call":
            answer(*call(request))
            continue
        if action == "transfer":
            clock, rate = transfer(**request)
            answer(clock, rate=rate)
            continue
        if action == "fill":
            ctypes.memset(base, request["value"], size)
            answer()
            continue
        if action == "compare":
            compare(bytes([request["value"]]), request["length"])
            answer()
            continue
        addresses = [base + index * stride for index in range(regions, request["regions"])]
        if engine.batch_register_memory(addresses, [region] * len(addresses)) != 0:
            raise RuntimeError(f"it cannot hold {request['regions']} regions")
        regions = request["regions"]
        answer()
    engine = None  # takes its keys back
except Exception as error:
    answer(error=f"{type(error).__name__}: {error}")
answers.flush()
os._exit(0)
