/* te.h: topologies before, beside and after an engine, and addresses that stand for either. */
#include <pthread.h>
#include <transfer_engine_c.h>

#include "child.h"
#include "engine.h"

static const char *const MATRIX = "{\"cpu:0\": [[\"a\"], [\"b\", \"c\"]], \"cpu:1\": [[\"b\", \"c\"], [\"a\"]]}";

static te_topology *create_topology(const char *matrix) {
    te_topology *topology = NULL;
    OK(te_topology_create(&topology));
    if (matrix != NULL)
        OK(te_topology_parse(topology, matrix));
    return topology;
}

/* Whether the text that a function gives holds another. */
#define GIVES(part, call, text)                  \
    do {                                         \
        char *text = NULL;                       \
        OK(call);                                \
        CHECK(text != NULL);                     \
        if (strstr(text, part) == NULL) {        \
            fprintf(stderr, "no %s in: %s\n", part, text); \
            CHECK(0);                            \
        }                                        \
        te_free_text(text);                      \
    } while (0)

static te_engine *create_without_transport(te_topology *topology) {
    te_engine_options options;
    te_engine *engine = NULL;
    memset(&options, 0, sizeof options);
    options.struct_size = sizeof options;
    options.server_name = "127.0.0.1";
    options.transport = "";
    options.topology_handle = topology;
    OK(te_engine_create(&options, &engine));
    return engine;
}

static void a_matrix_is_parsed_told_and_chosen_from(void) {
    te_topology *topology = create_topology(NULL);
    size_t index = 99;
    GIVES("{}", te_topology_json(topology, &text), text);
    EXPECT(TE_ERR_DEVICE_NOT_FOUND, te_topology_select(topology, "*", NULL, 0, &index));
    OK(te_topology_parse(topology, MATRIX));
    GIVES("\"cpu:1\":[[\"b\",\"c\"],[\"a\"]]", te_topology_json(topology, &text), text);
    const char *const names[] = {"a", "b", "c"};
    for (size_t i = 0; i < 3; i++)
        GIVES(names[i], te_topology_nic_name(topology, i, &text), text);
    char *none = (char *)names;
    EXPECT(TE_ERR_DEVICE_NOT_FOUND, te_topology_nic_name(topology, 3, &none));
    CHECK(none == (char *)names);
    OK(te_topology_select(topology, "cpu:0", NULL, 0, &index));
    EXPECT(0, index);
    const size_t walk[] = {1, 2, 0, 1};
    for (uint32_t retry = 1; retry <= 4; retry++) {
        OK(te_topology_select(topology, "cpu:1", NULL, retry, &index));
        EXPECT(walk[retry - 1], index);
    }
    OK(te_topology_select(topology, "cpu:1", "c", 0, &index));
    EXPECT(2, index);
    index = 99;
    EXPECT(TE_ERR_DEVICE_NOT_FOUND, te_topology_select(topology, "cpu:2", NULL, 0, &index));
    EXPECT(99, index);
    OK(te_topology_disable(topology, "a"));
    EXPECT(TE_ERR_DEVICE_NOT_FOUND, te_topology_disable(topology, "d"));
    GIVES("\"cpu:0\":[[],[\"b\",\"c\"]]", te_topology_json(topology, &text), text);
    GIVES("a", te_topology_nic_name(topology, 0, &text), text);
    OK(te_topology_select(topology, "cpu:0", NULL, 0, &index));
    CHECK(index == 1 || index == 2);
    EXPECT(TE_ERR_MALFORMED_JSON, te_topology_parse(topology, "{\"cpu:0\": []}"));
    GIVES("\"cpu:0\":[[],[\"b\",\"c\"]]", te_topology_json(topology, &text), text);
    GIVES("known from the topology only", te_topology_links(topology, 0, &text), text);
    GIVES("\"source\": \"topology\"", te_topology_links(topology, 1, &text), text);
    OK(te_topology_destroy(topology));
}

static void only_nics_that_are_named_are_discovered(void) {
    te_topology *topology = create_topology(MATRIX);
    const char *const nics[] = {"no such NIC", "nor this"};
    char *name = NULL;
    OK(te_topology_discover(topology, nics, 2));
    GIVES("cpu:", te_topology_json(topology, &text), text);
    EXPECT(TE_ERR_DEVICE_NOT_FOUND, te_topology_nic_name(topology, 0, &name));
    OK(te_topology_discover(topology, NULL, 0));
    REFUSED(te_topology_discover(topology, NULL, 1));
    OK(te_topology_destroy(topology));

    /* An engine that may find none has TCP. */
    te_engine_options options;
    te_engine *engine = NULL;
    int installed = 7;
    memset(&options, 0, sizeof options);
    options.struct_size = sizeof options;
    options.server_name = "127.0.0.1";
    options.transport = "auto";
    options.nics = nics;
    options.nic_count = 2;
    OK(te_engine_create(&options, &engine));
    OK(te_has_transport(engine, "tcp", &installed));
    EXPECT(1, installed);
    OK(te_has_transport(engine, "rdma", &installed));
    EXPECT(0, installed);
    OK(te_engine_topology(engine, &topology));
    EXPECT(TE_ERR_DEVICE_NOT_FOUND, te_topology_nic_name(topology, 0, &name));
    OK(te_engine_destroy(engine));
    OK(te_topology_destroy(topology));
    options.nics = NULL;
    REFUSED(te_engine_create(&options, &engine));
    /* An older program's options end before the names. */
    options.struct_size = offsetof(te_engine_options, nics);
    OK(te_engine_create(&options, &engine));
    OK(te_engine_destroy(engine));
}

static void an_engine_and_the_program_share_a_topology(void) {
    te_topology *topology = create_topology(MATRIX), *of_engine = NULL;
    te_engine *engine = create_without_transport(topology);
    OK(te_engine_topology(engine, &of_engine));
    CHECK(of_engine != topology);
    GIVES("cpu:1", te_topology_json(of_engine, &text), text);
    OK(te_topology_parse(topology, "{\"cpu:7\": [[\"x\"], []]}"));
    GIVES("cpu:7", te_topology_json(of_engine, &text), text);
    GIVES("cpu:7", te_engine_links(engine, 1, &text), text);
    OK(te_topology_destroy(topology));
    EXPECT(TE_ERR_INVALID_HANDLE, te_topology_destroy(topology));
    OK(te_topology_parse(of_engine, "{\"cpu:8\": [[\"x\"], []]}"));
    GIVES("cpu:8", te_engine_links(engine, 0, &text), text);
    /* No device of that name can be used: RDMA fails, and the better one is TCP. */
    REFUSED(te_install_transport(engine, "rdma", NULL));
    OK(te_install_transport(engine, "auto", "{\"cpu:9\": [[\"x\"], []]}"));
    GIVES("cpu:9", te_topology_json(of_engine, &text), text);
    OK(te_engine_destroy(engine));
    GIVES("cpu:9", te_topology_json(of_engine, &text), text);
    OK(te_topology_destroy(of_engine));
}

/* What a class over an engine is, as far as the library is concerned: an address. */
struct object {
    int anything;
};

static void an_object_stands_for_its_engine_from_its_alias_to_its_end(void) {
    static struct object object, other;
    static char memory[64];
    char text[64];
    te_engine *engine = create_engine(), *as_engine = (te_engine *)&object;
    transfer_engine_t as_handle = &object;
    EXPECT(TE_ERR_INVALID_HANDLE, te_engine_address(as_engine, text, sizeof text));
    OK(te_engine_set_alias(engine, &object));
    OK(te_engine_address(as_engine, text, sizeof text));
    OK(te_register_local_memory(as_engine, memory, sizeof memory, NULL));
    EXPECT(TE_ERR_ADDRESS_OVERLAPPED, te_register_local_memory(engine, memory, sizeof memory, NULL));
    OK(transfer(as_engine, TE_WRITE, memory, TE_LOCAL_SEGMENT, (uintptr_t)memory + 32, 8));
    OK(unregisterLocalMemory(as_handle, memory));
    uint64_t batch = allocateBatchID(as_handle, 1);
    CHECK(batch != INVALID_BATCH);
    OK(freeBatchID(as_handle, batch));
    /* One address at a time. */
    OK(te_engine_set_alias(as_engine, &other));
    EXPECT(TE_ERR_INVALID_HANDLE, te_engine_address(as_engine, text, sizeof text));
    OK(te_engine_address((te_engine *)&other, text, sizeof text));
    OK(te_engine_set_alias(engine, NULL));
    EXPECT(TE_ERR_INVALID_HANDLE, te_engine_address((te_engine *)&other, text, sizeof text));
    OK(te_engine_set_alias(engine, &object));
    /* The last engine that is given an address has it. */
    te_engine *second = create_engine();
    OK(te_engine_set_alias(second, &object));
    OK(te_engine_destroy(engine));
    OK(te_engine_address(as_engine, text, sizeof text));
    destroyTransferEngine(as_handle);
    EXPECT(TE_ERR_INVALID_HANDLE, te_engine_address(second, text, sizeof text));
    EXPECT(TE_ERR_INVALID_HANDLE, te_engine_address(as_engine, text, sizeof text));
    EXPECT(TE_ERR_INVALID_HANDLE, te_engine_destroy(as_engine));
    /* Keys are no addresses, and an address that was never given is none of ours, readable or not. */
    engine = create_engine();
    EXPECT(TE_ERR_INVALID_ARGUMENT, te_engine_set_alias(engine, engine));
    EXPECT(TE_ERR_INVALID_HANDLE, te_engine_set_alias((te_engine *)&object, &object));
    EXPECT(TE_ERR_INVALID_HANDLE, te_engine_address((te_engine *)16, text, sizeof text));
    OK(te_engine_destroy(engine));
}

static void links_of_an_object_without_an_engine_are_shown(void) {
    static struct object object;
    static char text[1 << 16];
    te_topology *topology = create_topology(MATRIX);
    CHECK(showLinks(&object, text, sizeof text, 1) < 0);
    OK(te_topology_set_alias(topology, &object));
    OK(showLinks(&object, text, sizeof text, 1));
    CHECK(strstr(text, "\"local_nics\"") != NULL && strstr(text, "cpu:1") != NULL);
    OK(showLinks(&object, text, 9, 0));
    EXPECT(8, strlen(text));
    CHECK(showLinks(&object, NULL, 9, 0) < 0);
    OK(discoverTopology(&object));
    EXPECT(TE_ERR_INVALID_HANDLE, te_engine_address((te_engine *)&object, text, sizeof text));
    CHECK(openSegment(&object, "127.0.0.1:1") < 0);
    /* The engine that comes takes the address over. */
    te_engine *engine = create_without_transport(topology);
    OK(te_engine_set_alias(engine, &object));
    OK(te_engine_address((te_engine *)&object, text, sizeof text));
    OK(showLinks(&object, text, sizeof text, 1));
    EXPECT(TE_ERR_INVALID_ARGUMENT, te_topology_set_alias(topology, &object));
    OK(te_engine_destroy(engine));
    CHECK(showLinks(&object, text, sizeof text, 1) < 0);
    OK(te_topology_set_alias(topology, &object));
    OK(te_topology_destroy((te_topology *)&object));
    CHECK(showLinks(&object, text, sizeof text, 1) < 0);
    EXPECT(TE_ERR_INVALID_HANDLE, te_topology_set_alias(topology, &object));
}

static void *create_and_destroy_objects(void *object) {
    for (int i = 0; i < 50; i++) {
        char text[64];
        te_engine *engine = create_engine(), *as_engine = object;
        OK(te_engine_set_alias(engine, object));
        OK(te_engine_address(as_engine, text, sizeof text));
        OK(te_engine_destroy(as_engine));
        EXPECT(TE_ERR_INVALID_HANDLE, te_engine_address(as_engine, text, sizeof text));
    }
    return NULL;
}

static void objects_come_and_go_on_several_threads(void) {
    static struct object objects[4];
    pthread_t threads[4];
    for (int i = 0; i < 4; i++)
        OK(pthread_create(&threads[i], NULL, create_and_destroy_objects, &objects[i]));
    for (int i = 0; i < 4; i++)
        OK(pthread_join(threads[i], NULL));
}

static struct object forked;

static void use_in_child(void *parents) {
    char text[64];
    EXPECT(TE_ERR_FORKED, te_engine_address((te_engine *)&forked, text, sizeof text));
    EXPECT(TE_ERR_FORKED, te_engine_set_alias((te_engine *)&forked, &forked));
    EXPECT(TE_ERR_FORKED, te_engine_destroy((te_engine *)&forked));
    EXPECT(TE_ERR_FORKED, te_topology_destroy(parents));
    /* The object of the child, at the same address. */
    te_topology *topology = create_topology(MATRIX);
    OK(te_topology_set_alias(topology, &forked));
    GIVES("cpu:0", te_topology_json((te_topology *)&forked, &text), text);
    OK(te_topology_destroy(topology));
}

static void a_forked_child_is_told_by_the_address_as_well(void) {
    char text[64];
    te_topology *topology = create_topology(MATRIX);
    te_engine *engine = create_without_transport(topology);
    OK(te_engine_set_alias(engine, &forked));
    in_child(use_in_child, topology);
    OK(te_engine_address((te_engine *)&forked, text, sizeof text));
    OK(te_engine_destroy(engine));
    OK(te_topology_destroy(topology));
}

static void bad_arguments_are_refused(void) {
    te_topology *topology = create_topology(MATRIX), *dead = create_topology(NULL);
    te_engine *engine = create_without_transport(NULL);
    te_engine_options options;
    char *text = NULL;
    size_t index;
    int installed;
    memset(&options, 0, sizeof options);
    options.struct_size = sizeof options;
    options.server_name = "127.0.0.1";
    OK(te_topology_destroy(dead));
    te_topology *const bad[] = {NULL, dead, (te_topology *)engine, (te_topology *)&options};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        REFUSED(te_topology_discover(bad[i], NULL, 0));
        REFUSED(te_topology_parse(bad[i], MATRIX));
        REFUSED(te_topology_json(bad[i], &text));
        REFUSED(te_topology_nic_name(bad[i], 0, &text));
        REFUSED(te_topology_links(bad[i], 0, &text));
        REFUSED(te_topology_select(bad[i], "*", NULL, 0, &index));
        REFUSED(te_topology_disable(bad[i], "a"));
        REFUSED(te_topology_set_alias(bad[i], &options));
        if (bad[i] == NULL) continue;
        REFUSED(te_topology_destroy(bad[i]));
        options.topology_handle = bad[i];
        REFUSED(te_engine_create(&options, &engine));
    }
    OK(te_topology_destroy(NULL));
    REFUSED(te_topology_create(NULL));
    REFUSED(te_topology_parse(topology, NULL));
    REFUSED(te_topology_json(topology, NULL));
    REFUSED(te_topology_nic_name(topology, 0, NULL));
    REFUSED(te_topology_links(topology, 0, NULL));
    REFUSED(te_topology_select(topology, NULL, NULL, 0, &index));
    REFUSED(te_topology_select(topology, "*", NULL, 0, NULL));
    REFUSED(te_topology_disable(topology, NULL));
    REFUSED(te_engine_topology(engine, NULL));
    REFUSED(te_engine_links(engine, 0, NULL));
    REFUSED(te_has_transport(engine, NULL, &installed));
    REFUSED(te_has_transport(engine, "tcp", NULL));
    CHECK(text == NULL);
    te_free_text(NULL);
    OK(te_engine_destroy(engine));
    OK(te_topology_destroy(topology));
}

int main(void) {
    a_matrix_is_parsed_told_and_chosen_from();
    only_nics_that_are_named_are_discovered();
    an_engine_and_the_program_share_a_topology();
    an_object_stands_for_its_engine_from_its_alias_to_its_end();
    links_of_an_object_without_an_engine_are_shown();
    objects_come_and_go_on_several_threads();
    a_forked_child_is_told_by_the_address_as_well();
    bad_arguments_are_refused();
    return 0;
}
