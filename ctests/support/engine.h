/* Shorthands for te.h that most tests need. */
#ifndef ENGINE_H
#define ENGINE_H

#include <string.h>

#include "check.h"

/* An engine on loopback, with TCP. */
static inline te_engine *create_engine(void) {
    te_engine *engine = NULL;
    te_engine_options options;
    memset(&options, 0, sizeof options);
    options.struct_size = sizeof options;
    options.server_name = "127.0.0.1";
    OK(te_engine_create(&options, &engine));
    CHECK(engine != NULL);
    return engine;
}

static inline te_transfer_request make_request(te_opcode opcode, void *local, te_segment segment, uint64_t remote_addr,
                                               uint64_t length) {
    te_transfer_request request;
    memset(&request, 0, sizeof request);
    request.opcode = opcode;
    request.local = local;
    request.segment = segment;
    request.remote_addr = remote_addr;
    request.length = length;
    return request;
}

/* One transfer, synchronous, with the engine's defaults. */
static inline te_status transfer(te_engine *engine, te_opcode opcode, void *local, te_segment segment, uint64_t remote_addr,
                                 uint64_t length) {
    te_transfer_request request = make_request(opcode, local, segment, remote_addr, length);
    return te_batch_transfer(engine, &request, sizeof request, 1, NULL, NULL, 0);
}

static inline te_transfer_options make_transfer_options(void) {
    te_transfer_options options;
    memset(&options, 0, sizeof options);
    options.struct_size = sizeof options;
    return options;
}

static inline te_memory_options make_memory_options(void) {
    te_memory_options options;
    memset(&options, 0, sizeof options);
    options.struct_size = sizeof options;
    return options;
}

#endif
