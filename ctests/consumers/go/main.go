// A Go program that uses the interface of upstream's own Go client, through cgo.
package main

/*
#cgo pkg-config: transfer_engine
#include <stdlib.h>
#include <te.h>
#include <transfer_engine_c.h>
*/
import "C"

import (
	"bytes"
	"fmt"
	"os"
	"unsafe"
)

func check(ok bool, what string) {
	if !ok {
		fmt.Fprintf(os.Stderr, "%s: %s\n", what, C.GoString(C.te_last_error()))
		os.Exit(1)
	}
}

func main() {
	metadata, name, protocol, location := C.CString("P2PHANDSHAKE"), C.CString("127.0.0.1"), C.CString("tcp"), C.CString("*")
	engine := C.createTransferEngine(metadata, name, name, 0, 0)
	check(engine != nil, "createTransferEngine")
	check(C.installTransport(engine, protocol, nil) != nil, "installTransport")

	const length = 4096
	memory := C.calloc(2, length)
	check(C.registerLocalMemory(engine, memory, 2*length, location, 1) == 0, "registerLocalMemory")
	content := unsafe.Slice((*byte)(memory), 2*length)
	copy(content, bytes.Repeat([]byte("transfer"), length/8))

	batch := C.allocateBatchID(engine, 1)
	check(batch != C.INVALID_BATCH, "allocateBatchID")
	request := C.transfer_request_t{
		opcode: C.OPCODE_WRITE, source: memory, target_id: C.LOCAL_SEGMENT,
		target_offset: C.uint64_t(uintptr(memory) + length), length: length,
	}
	check(C.submitTransfer(engine, batch, &request, 1) == 0, "submitTransfer")
	var status C.transfer_status_t
	for status.status == C.STATUS_WAITING {
		check(C.getTransferStatus(engine, batch, 0, &status) == 0, "getTransferStatus")
	}
	check(status.status == C.STATUS_COMPLETED, "the transfer")
	check(bytes.Equal(content[:length], content[length:]), "comparing the bytes")
	check(C.freeBatchID(engine, batch) == 0, "freeBatchID")
	check(C.unregisterLocalMemory(engine, memory) == 0, "unregisterLocalMemory")
	C.destroyTransferEngine(engine)
	fmt.Println("linked with version", C.GoString(C.te_version()))
}
