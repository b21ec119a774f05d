/* The program "peer"; support/peer.h says what it does. */
#include <inttypes.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "check.h"
#include "peer.h"

static te_engine *engine;
static unsigned char *base;

/* Asked for by the thread sanitizer's runtime, where there is one: this file is compiled without. What initiators read and write here may come by
   several connections, which several threads serve: nobody in this process can see that the other one has waited in between. */
const char *__tsan_default_suppressions(void);
const char *__tsan_default_suppressions(void) { return "race:transfer_engine::transport::tcp::server::\n"; }

static te_status register_part(size_t offset, size_t length, const te_memory_options *options) {
    return te_register_local_memory(engine, base + offset, length, options);
}

static te_status notify(const char *address, const char *name, const char *text) {
    te_segment segment;
    te_status status = te_open_segment(engine, address, &segment);
    return status != 0 ? status : te_notify(engine, segment, name, text);
}

/* Those that were taken together are told one by one. */
static void tell_notification(void) {
    static te_notification *list;
    static size_t count, next;
    for (int wait = 0; next == count && wait < 10000; wait++) {
        te_free_notifications(list, count);
        next = 0;
        OK(te_take_notifications(engine, &list, &count));
        if (count == 0) usleep(1000);
    }
    if (next == count) {
        printf("none\n");
        return;
    }
    printf("%s %s\n", list[next].name, list[next].message);
    if (++next == count) {
        te_free_notifications(list, count);
        list = NULL;
        next = count = 0;
    }
}

/* Starts transfers in both directions, from the first half of the large region and to its second, with memory of the engine of that address. */
static te_status begin(const char *address, uint64_t remote, size_t length, size_t count) {
    te_segment segment = 0;
    te_batch batch = 0;
    te_transfer_request *requests = calloc(count, sizeof *requests);
    te_status status = te_open_segment(engine, address, &segment);
    if (status == 0) status = te_batch_create(engine, count, &batch);
    for (size_t i = 0; i < count; i++) {
        requests[i].opcode = i % 2 ? TE_READ : TE_WRITE;
        requests[i].local = base + PEER_LARGE + i % 2 * (PEER_LARGE_LENGTH / 2);
        requests[i].segment = segment;
        requests[i].remote_addr = remote;
        requests[i].length = length;
    }
    if (status == 0) status = te_batch_submit(engine, batch, requests, sizeof *requests, count, NULL);
    free(requests);
    return status;
}

static void obey(const char *order) {
    size_t offset, length, count;
    uint64_t seed;
    char address[256], name[256], text[1024];
    if (sscanf(order, "sum %zu %zu", &offset, &length) == 2) {
        printf("%" PRIu64 "\n", checksum(base + offset, length));
    } else if (sscanf(order, "fill %zu %zu %" SCNu64, &offset, &length, &seed) == 3) {
        fill(base + offset, length, seed);
        printf("done\n");
    } else if (sscanf(order, "register %zu %zu", &offset, &length) == 2) {
        printf("%d\n", (int)register_part(offset, length, NULL));
    } else if (sscanf(order, "unregister %zu", &offset) == 1) {
        printf("%d\n", (int)te_unregister_local_memory(engine, base + offset));
    } else if (sscanf(order, "notify %255s %255s %1023[^\n]", address, name, text) == 3) {
        printf("%d\n", (int)notify(address, name, text));
    } else if (sscanf(order, "begin %255s %" SCNu64 " %zu %zu", address, &seed, &length, &count) == 4) {
        printf("%d\n", (int)begin(address, seed, length, count));
    } else if (strncmp(order, "take", 4) == 0) {
        tell_notification();
    } else {
        printf("unknown order\n");
    }
    fflush(stdout);
}

int main(void) {
    te_engine_options options;
    memset(&options, 0, sizeof options);
    options.struct_size = sizeof options;
    options.server_name = "127.0.0.1";
    OK(te_engine_create(&options, &engine));

    base = mmap(NULL, PEER_LENGTH, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(base != MAP_FAILED);
    te_memory_options private_memory;
    memset(&private_memory, 0, sizeof private_memory);
    private_memory.struct_size = sizeof private_memory;
    private_memory.access = TE_ACCESS_LOCAL;
    OK(register_part(PEER_FIRST, PEER_FIRST_LENGTH, NULL));
    OK(register_part(PEER_SECOND, PEER_SECOND_LENGTH, NULL));
    OK(register_part(PEER_PRIVATE, PEER_PRIVATE_LENGTH, &private_memory));
    OK(register_part(PEER_LARGE, PEER_LARGE_LENGTH, NULL));

    char address[256];
    OK(te_engine_address(engine, address, sizeof address));
    printf("%s %" PRIu64 "\n", address, (uint64_t)(uintptr_t)base);
    fflush(stdout);

    char order[2048];
    while (fgets(order, sizeof order, stdin) != NULL) obey(order);
    OK(te_engine_destroy(engine));
    munmap(base, PEER_LENGTH);
    return 0;
}
