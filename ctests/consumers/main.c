/* The smallest program that shows that a build system found headers and library, and that they fit together. */
#include <stdio.h>
#include <string.h>
#include <te.h>
#include <transfer_engine_c.h>

int main(void) {
    static char source[64] = "moved", target[64];
    static te_engine_options options;
    te_engine *engine;
    static te_transfer_request request;
    options.struct_size = sizeof options;
    options.server_name = "127.0.0.1";
    if (te_engine_create(&options, &engine) != 0) goto failed;
    if (registerLocalMemory(engine, target, sizeof target, "*", 1) != 0) goto failed;
    request.opcode = TE_WRITE;
    request.local = source;
    request.segment = TE_LOCAL_SEGMENT;
    request.remote_addr = (uintptr_t)target;
    request.length = sizeof target;
    if (te_batch_transfer(engine, &request, sizeof request, 1, NULL, NULL, 0) != 0) goto failed;
    if (strcmp(target, "moved") != 0) return 1;
    if (te_engine_destroy(engine) != 0) goto failed;
    printf("linked with version %s\n", te_version());
    return 0;
failed:
    fprintf(stderr, "%s\n", te_last_error());
    return 1;
}
