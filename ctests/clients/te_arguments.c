/* te.h: what is refused, and that refusing is all that happens: null and hostile pointers, dead handles, odd sizes, fork. */
#include <pthread.h>
#include <transfer_engine_c.h>

#include "child.h"
#include "engine.h"
#include "wire.h"

static void versions_and_names(void) {
    CHECK(strcmp(te_version(), TE_TEST_VERSION) == 0);
    CHECK(strcmp(te_status_name(0), "TE_OK") == 0);
    CHECK(strcmp(te_status_name(TE_ERR_ADDRESS_OVERLAPPED), "TE_ERR_ADDRESS_OVERLAPPED") == 0);
    CHECK(te_status_name(-123456) != NULL && te_status_name(123456) != NULL);
}

static void *last_error_of_new_thread(void *unused) {
    (void)unused;
    CHECK(strcmp(te_last_error(), "") == 0);
    return NULL;
}

static void last_error_belongs_to_its_thread(void) {
    pthread_t thread;
    REFUSED(te_engine_create(NULL, NULL));
    OK(pthread_create(&thread, NULL, last_error_of_new_thread, NULL));
    OK(pthread_join(thread, NULL));
    CHECK(*te_last_error());
}

/* Every function that takes an engine, with arguments that are otherwise fine. */
static void all_refuse(te_engine *engine) {
    static char memory[64];
    char text[256];
    void *addrs[1] = {memory};
    te_buffer buffer = {memory, sizeof memory};
    te_memory_region region;
    te_transfer_request request = make_request(TE_READ, memory, TE_LOCAL_SEGMENT, (uintptr_t)memory, 8);
    te_transfer_result result;
    te_batch_status batch_status;
    te_notification *list = NULL;
    te_statistics statistics;
    te_segment segment;
    te_batch batch = 0;
    te_topology *topology;
    char *given;
    size_t count;
    int fd;
    memset(&region, 0, sizeof region);
    region.struct_size = sizeof region;
    memset(&result, 0, sizeof result);
    result.struct_size = sizeof result;
    memset(&batch_status, 0, sizeof batch_status);
    batch_status.struct_size = sizeof batch_status;
    memset(&statistics, 0, sizeof statistics);
    statistics.struct_size = sizeof statistics;

    REFUSED(te_engine_address(engine, text, sizeof text));
    REFUSED(te_install_transport(engine, "tcp", NULL));
    REFUSED(te_has_transport(engine, "tcp", &fd));
    REFUSED(te_engine_topology(engine, &topology));
    REFUSED(te_engine_links(engine, 0, &given));
    REFUSED(te_engine_set_alias(engine, memory));
    REFUSED(te_publish(engine));
    REFUSED(te_publish_address(engine));
    REFUSED(te_shut_down(engine));
    REFUSED(te_find_overlap(engine, memory, sizeof memory, &region));
    REFUSED(te_probe(engine, "127.0.0.1:1"));
    REFUSED(te_forget_segment(engine, "127.0.0.1:1"));
    REFUSED(te_segment_json(engine, TE_LOCAL_SEGMENT, 0, &given));
    REFUSED(te_notify_name(engine, "127.0.0.1:1", "name", "message"));
    REFUSED(te_nic_loads(engine, NULL, sizeof(te_nic_load), 0, &count));
    REFUSED(te_register_local_memory(engine, memory, sizeof memory, NULL));
    REFUSED(te_unregister_local_memory(engine, memory));
    REFUSED(te_register_local_memory_batch(engine, &buffer, sizeof buffer, 1, NULL));
    REFUSED(te_unregister_local_memory_batch(engine, addrs, 1));
    REFUSED(te_find_local_memory(engine, memory, &region));
    REFUSED(te_list_local_memory(engine, &region, sizeof region, 1, &count));
    REFUSED(te_open_segment(engine, "127.0.0.1:9", &segment));
    REFUSED(te_close_segment(engine, TE_LOCAL_SEGMENT));
    REFUSED(te_refresh_segment(engine, TE_LOCAL_SEGMENT));
    REFUSED(te_list_segment_memory(engine, TE_LOCAL_SEGMENT, &region, sizeof region, 1, &count));
    REFUSED(te_probe_segment(engine, TE_LOCAL_SEGMENT));
    REFUSED(te_batch_transfer(engine, &request, sizeof request, 1, NULL, NULL, 0));
    REFUSED(te_batch_create(engine, 1, &batch));
    REFUSED(te_batch_submit(engine, batch, &request, sizeof request, 1, NULL));
    REFUSED(te_batch_task_status(engine, batch, 0, &result));
    REFUSED(te_batch_task_error(engine, batch, 0, text, sizeof text));
    REFUSED(te_batch_poll(engine, batch, &batch_status));
    REFUSED(te_batch_wait(engine, batch, 1, &batch_status));
    REFUSED(te_batch_cancel(engine, batch));
    REFUSED(te_batch_event_fd(engine, batch, &fd));
    REFUSED(te_batch_free(engine, batch));
    REFUSED(te_notify(engine, TE_LOCAL_SEGMENT, "name", "message"));
    REFUSED(te_take_notifications(engine, &list, &count));
    REFUSED(te_get_statistics(engine, &statistics));
}

static void handles_that_name_nothing_are_refused(void) {
    static char memory[64];
    te_engine *engine = create_engine();
    all_refuse(NULL);
    all_refuse((te_engine *)1);
    all_refuse((te_engine *)memory);
    all_refuse((te_engine *)UINTPTR_MAX);
    all_refuse((te_engine *)((uintptr_t)engine ^ 1));
    all_refuse((te_engine *)((uintptr_t)engine + 4096));
    OK(te_engine_destroy(engine));
    all_refuse(engine);
    REFUSED(te_engine_destroy(engine));
    OK(te_engine_destroy(NULL));

    /* A new engine is not taken for the old one. */
    te_engine *next = create_engine();
    CHECK(next != engine);
    REFUSED(te_register_local_memory(engine, memory, sizeof memory, NULL));
    OK(te_engine_destroy(next));
}

static void null_arguments_are_refused(void) {
    static char memory[64];
    char text[256];
    te_engine *engine = create_engine();
    te_transfer_request request = make_request(TE_READ, memory, TE_LOCAL_SEGMENT, (uintptr_t)memory, 8);
    te_segment segment;
    te_batch batch;
    te_notification *list;
    size_t count;

    REFUSED(te_engine_create(NULL, NULL));
    REFUSED(te_engine_address(engine, NULL, 16));
    REFUSED(te_install_transport(engine, NULL, NULL));
    REFUSED(te_register_local_memory(engine, NULL, 64, NULL));
    REFUSED(te_register_local_memory(engine, memory, 0, NULL));
    REFUSED(te_unregister_local_memory(engine, NULL));
    REFUSED(te_register_local_memory_batch(engine, NULL, sizeof(te_buffer), 1, NULL));
    REFUSED(te_unregister_local_memory_batch(engine, NULL, 1));
    REFUSED(te_find_local_memory(engine, memory, NULL));
    te_registration_cost cost;
    memset(&cost, 0, sizeof cost);
    REFUSED(te_get_registration_cost(engine, memory, NULL, NULL, sizeof(te_device_cost), 0));
    REFUSED(te_get_registration_cost(engine, memory, &cost, NULL, sizeof(te_device_cost), 0));
    cost.struct_size = sizeof cost;
    REFUSED(te_get_registration_cost(engine, memory, &cost, NULL, sizeof(te_device_cost), 1));
    REFUSED(te_get_registration_cost(engine, memory, &cost, NULL, 0, 0));
    REFUSED(te_list_local_memory(engine, NULL, sizeof(te_memory_region), 1, &count));
    REFUSED(te_list_local_memory(engine, NULL, sizeof(te_memory_region), 0, NULL));
    REFUSED(te_open_segment(engine, NULL, &segment));
    REFUSED(te_open_segment(engine, "", &segment));
    REFUSED(te_open_segment(engine, "127.0.0.1:1", NULL));
    REFUSED(te_list_segment_memory(engine, TE_LOCAL_SEGMENT, NULL, sizeof(te_memory_region), 1, &count));
    REFUSED(te_batch_transfer(engine, NULL, sizeof request, 1, NULL, NULL, 0));
    REFUSED(te_batch_create(engine, 1, NULL));
    OK(te_batch_create(engine, 1, &batch));
    REFUSED(te_batch_submit(engine, batch, NULL, sizeof request, 1, NULL));
    REFUSED(te_batch_task_status(engine, batch, 0, NULL));
    REFUSED(te_batch_task_error(engine, batch, 0, NULL, 16));
    REFUSED(te_batch_poll(engine, batch, NULL));
    REFUSED(te_batch_event_fd(engine, batch, NULL));
    OK(te_batch_free(engine, batch));
    REFUSED(te_notify(engine, TE_LOCAL_SEGMENT, NULL, "message"));
    REFUSED(te_notify(engine, TE_LOCAL_SEGMENT, "name", NULL));
    REFUSED(te_take_notifications(engine, NULL, &count));
    REFUSED(te_take_notifications(engine, &list, NULL));
    REFUSED(te_get_statistics(engine, NULL));
    te_free_notifications(NULL, 0);

    /* Empty lists are fine, wherever their pointer points. */
    OK(te_register_local_memory_batch(engine, NULL, sizeof(te_buffer), 0, NULL));
    OK(te_unregister_local_memory_batch(engine, NULL, 0));

    /* Outputs are written only on success. */
    segment = 4711;
    REFUSED(te_open_segment(engine, "127.0.0.1:1", &segment));
    EXPECT(4711, segment);

    /* The address needs its whole text, and its terminating zero. */
    OK(te_engine_address(engine, text, sizeof text));
    size_t length = strlen(text);
    OK(te_engine_address(engine, text, length + 1));
    EXPECT(TE_ERR_INVALID_ARGUMENT, te_engine_address(engine, text, length));
    EXPECT(TE_ERR_INVALID_ARGUMENT, te_engine_address(engine, text, 0));
    OK(te_engine_destroy(engine));
}

/* No device has to know memory for TCP: any mode does, and nobody takes down what it took. */
static void memory_is_registered_in_any_parallel_mode(void) {
    static char memory[64];
    te_engine *engine = create_engine();
    te_memory_options options;
    te_registration_cost cost;
    memset(&options, 0, sizeof options);
    memset(&cost, 0, sizeof cost);
    options.struct_size = sizeof options;
    cost.struct_size = sizeof cost;
    for (options.parallel = TE_PARALLEL_DEFAULT; options.parallel <= TE_PARALLEL_ON; options.parallel++) {
        OK(te_register_local_memory(engine, memory, sizeof memory, &options));
        EXPECT(TE_ERR_ADDRESS_NOT_REGISTERED,
               te_get_registration_cost(engine, memory, &cost, NULL, sizeof(te_device_cost), 0));
        OK(te_unregister_local_memory(engine, memory));
    }
    EXPECT(TE_ERR_INVALID_ARGUMENT, te_register_local_memory(engine, memory, sizeof memory, &options));
    OK(te_engine_destroy(engine));
}

static void structs_may_grow(void) {
    static char memory[64];
    te_engine *engine = create_engine();
    struct {
        te_memory_options known;
        uint64_t later;
    } options;
    memset(&options, 0, sizeof options);
    options.known.struct_size = sizeof options;
    OK(te_register_local_memory(engine, memory, sizeof memory, &options.known));
    OK(te_unregister_local_memory(engine, memory));
    options.later = 1;
    EXPECT(TE_ERR_INVALID_ARGUMENT, te_register_local_memory(engine, memory, sizeof memory, &options.known));
    options.known.struct_size = 0;
    EXPECT(TE_ERR_INVALID_ARGUMENT, te_register_local_memory(engine, memory, sizeof memory, &options.known));
    options.known.struct_size = 4;
    EXPECT(TE_ERR_INVALID_ARGUMENT, te_register_local_memory(engine, memory, sizeof memory, &options.known));

    struct {
        te_transfer_request known;
        uint64_t later;
    } requests[2];
    memset(requests, 0, sizeof requests);
    for (int i = 0; i < 2; i++)
        requests[i].known = make_request(TE_WRITE, memory, TE_LOCAL_SEGMENT, (uintptr_t)(memory + 32 + 8 * i), 8);
    OK(te_register_local_memory(engine, memory, sizeof memory, NULL));
    memcpy(memory, "12345678", 8);
    OK(te_batch_transfer(engine, &requests[0].known, sizeof requests[0], 2, NULL, NULL, 0));
    CHECK(memcmp(memory + 32, "1234567812345678", 16) == 0);
    requests[1].later = 1;
    EXPECT(TE_ERR_INVALID_ARGUMENT, te_batch_transfer(engine, &requests[0].known, sizeof requests[0], 2, NULL, NULL, 0));
    EXPECT(TE_ERR_INVALID_ARGUMENT, te_batch_transfer(engine, &requests[0].known, 8, 1, NULL, NULL, 0));
    OK(te_engine_destroy(engine));
}

static void create_and_destroy(void) { OK(te_engine_destroy(create_engine())); }

/* Whether the scheme is unknown, the server unreachable or the text no text: an error with a reason in good time, and nothing is left. */
static void creation_fails_in_bounded_time_with_a_reason(void) {
    static char long_text[64 << 10];
    memset(long_text, 'x', sizeof long_text - 1);
    const char *const servers[] = {"nothing://127.0.0.1:1", "", " ", "p2phandshake", "P2PHANDSHAKE ", "127.0.0.1:1", "http://127.0.0.1:1/metadata",
                                   "https://127.0.0.1:1", "http://", "http://no.such.host.invalid/metadata", "redis://127.0.0.1:1",
                                   "etcd://127.0.0.1:1", "etcd://127.0.0.1:1;127.0.0.1:2", "://", "%s%n", "\xff\xfe", long_text};
    const char *const names[] = {"a b", "x/y", "127.0.0.1 :1", "line\nbreak", "\xff\xfe"};
    te_engine *engine = NULL;
    te_engine_options options;
    create_and_destroy();
    int files = count_entries("/proc/self/fd"), threads = count_entries("/proc/self/task");
    double start = now();
    for (size_t i = 0; i < sizeof servers / sizeof *servers; i++) {
        memset(&options, 0, sizeof options);
        options.struct_size = sizeof options;
        options.metadata = servers[i];
        options.server_name = "127.0.0.1";
        REFUSED(te_engine_create(&options, &engine));
        CHECK(strlen(te_last_error()) > 10);
        CHECK(createTransferEngine(servers[i], "127.0.0.1", "127.0.0.1", 0, 0) == NULL);
        CHECK(createTransferEngine(servers[i], "127.0.0.1", "127.0.0.1", 0, 1) == NULL);
    }
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        options.metadata = NULL;
        options.server_name = names[i];
        REFUSED(te_engine_create(&options, &engine));
        CHECK(createTransferEngine("P2PHANDSHAKE", names[i], "127.0.0.1", 0, 1) == NULL);
    }
    CHECK(createTransferEngine(NULL, "127.0.0.1", "127.0.0.1", 0, 1) == NULL);
    CHECK(createTransferEngine("P2PHANDSHAKE", NULL, "127.0.0.1", 0, 1) == NULL);
    CHECK(*te_last_error());
    memset(&options, 0, sizeof options);
    options.struct_size = sizeof options;
    options.server_name = "127.0.0.1";
    options.transport = "pigeon";
    REFUSED(te_engine_create(&options, &engine));
    CHECK(engine == NULL);
    CHECK(now() - start < 20);
    expect_entries(files, "/proc/self/fd");
    expect_entries(threads, "/proc/self/task");

    options.transport = "";
    OK(te_engine_create(&options, &engine));
    REFUSED(te_install_transport(engine, "pigeon", NULL));
    REFUSED(te_install_transport(engine, "rdma", "this is not JSON"));
    OK(te_install_transport(engine, "tcp", NULL));
    OK(te_install_transport(engine, "tcp", NULL));
    OK(te_engine_destroy(engine));
}

static int messages;
static void count_message(void *user_data, te_log_level level, const char *target, const char *message) {
    CHECK(user_data == &messages);
    CHECK(level >= TE_LOG_ERROR && level <= TE_LOG_WARNING);
    CHECK(target != NULL && message != NULL && *message);
    __atomic_add_fetch(&messages, 1, __ATOMIC_RELAXED);
}

static void the_log_goes_where_it_is_sent(void) {
    static char memory[64];
    te_engine *engine = create_engine();
    OK(te_set_log_callback(count_message, &messages, TE_LOG_WARNING));
    OK(te_register_local_memory(engine, memory, sizeof memory, NULL));
    EXPECT(TE_ERR_ADDRESS_OVERLAPPED, te_register_local_memory(engine, memory, sizeof memory, NULL));
    CHECK(__atomic_load_n(&messages, __ATOMIC_RELAXED) > 0);
    OK(te_set_log_callback(NULL, NULL, TE_LOG_WARNING));
    int before = __atomic_load_n(&messages, __ATOMIC_RELAXED);
    EXPECT(TE_ERR_ADDRESS_OVERLAPPED, te_register_local_memory(engine, memory, sizeof memory, NULL));
    EXPECT(before, __atomic_load_n(&messages, __ATOMIC_RELAXED));
    OK(te_engine_destroy(engine));
}

static void use_in_child(void *parents) {
    static char memory[64];
    all_refuse(parents);
    EXPECT(TE_ERR_FORKED, te_unregister_local_memory(parents, memory));
    EXPECT(TE_ERR_FORKED, te_engine_destroy(parents));
#ifndef __SANITIZE_THREAD__ /* it cannot start threads in a child of a process that had some */
    te_engine *own = create_engine();
    OK(te_register_local_memory(own, memory, sizeof memory, NULL));
    EXPECT(TE_ERR_FORKED, te_unregister_local_memory(parents, memory));
    OK(te_engine_destroy(own));
#endif
}

static void a_forked_child_is_refused_and_may_start_anew(void) {
    static char memory[64];
    te_engine *engine = create_engine();
    OK(te_register_local_memory(engine, memory, sizeof memory, NULL));
    in_child(use_in_child, engine);
    OK(te_unregister_local_memory(engine, memory));
    OK(te_engine_destroy(engine));
}

/* Counts that no memory can have are refused before anything is done with them. */
static void impossible_counts_are_refused(void) {
    static char memory[64];
    te_engine *engine = create_engine();
    te_buffer buffer = {memory, sizeof memory};
    void *addr = memory;
    te_transfer_request request = make_request(TE_READ, memory, TE_LOCAL_SEGMENT, (uintptr_t)memory, 8);
    te_batch batch;
    const size_t counts[] = {SIZE_MAX, SIZE_MAX / sizeof request + 1, SIZE_MAX / 2, (size_t)1 << 45};
    OK(te_batch_create(engine, SIZE_MAX, &batch));
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        REFUSED(te_register_local_memory_batch(engine, &buffer, sizeof buffer, counts[i], NULL));
        REFUSED(te_unregister_local_memory_batch(engine, &addr, counts[i]));
        REFUSED(te_batch_transfer(engine, &request, sizeof request, counts[i], NULL, NULL, 0));
        REFUSED(te_batch_submit(engine, batch, &request, sizeof request, counts[i], NULL));
    }
    OK(te_batch_free(engine, batch));
    OK(te_engine_destroy(engine));
}

int main(void) {
    versions_and_names();
    last_error_belongs_to_its_thread();
    handles_that_name_nothing_are_refused();
    null_arguments_are_refused();
    memory_is_registered_in_any_parallel_mode();
    structs_may_grow();
    /* Before names are looked up that the system takes long for: threads may still be at it afterwards, and what these hold at the
       moment of the fork is held in the child for good. */
    a_forked_child_is_refused_and_may_start_anew();
    creation_fails_in_bounded_time_with_a_reason();
    the_log_goes_where_it_is_sent();
    impossible_counts_are_refused();
    return 0;
}
