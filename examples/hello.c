#include <stdio.h>
#include <te.h>
#include <unistd.h>

#define DO(call) if ((call) != 0) { fprintf(stderr, "%s: %s\n", #call, te_last_error()); return 1; }

int main(int argc, char **argv) {
    static char memory[4096];
    te_engine *engine;
    DO(te_engine_create(NULL, &engine));

    if (argc < 2) { /* The target: lets peers write into its memory. */
        char name[256];
        te_notification *list = NULL;
        size_t count = 0;
        DO(te_register_local_memory(engine, memory, sizeof memory, NULL));
        DO(te_engine_address(engine, name, sizeof name));
        printf("%s\n", name);
        fflush(stdout);
        for (; count == 0; usleep(1000)) DO(te_take_notifications(engine, &list, &count));
        te_free_notifications(list, count);
        printf("received: %s\n", memory);
    } else { /* The initiator: writes to the target that its argument names, and tells it. */
        const char text[] = "Hello from the other process";
        te_segment peer;
        te_memory_region target = {.struct_size = sizeof target};
        size_t count;
        te_transfer_options options = {.struct_size = sizeof options, .notify_name = "greeting", .notify_message = ""};
        DO(te_open_segment(engine, argv[1], &peer));
        DO(te_list_segment_memory(engine, peer, &target, sizeof target, 1, &count));
        if (count == 0) { fprintf(stderr, "%s offers no memory\n", argv[1]); return 1; }
        te_transfer_request request = {
            .opcode = TE_WRITE, .local = (void *)text, .segment = peer, .remote_addr = target.addr, .length = sizeof text};
        DO(te_batch_transfer(engine, &request, sizeof request, 1, &options, NULL, 0));
    }
    DO(te_engine_destroy(engine));
    return 0;
}
