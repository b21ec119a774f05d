"""An engine of Mooncake's package for `te bench register --metadata`: URI NAME BYTES STRIDE REGION. Requests and answers are JSON lines."""

import ctypes
import json
import mmap
import os
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


def answer(clock=0.0, processor=0.0, error=None):
    print(json.dumps({"clock": clock, "processor": processor, "error": error}), file=answers)


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
    answer()
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "call":
            answer(*call(request))
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
