/* te.h: metadata servers, with one of this test's own that keeps a few texts and speaks HTTP. */
#include <pthread.h>
#include <strings.h>
#include <sys/socket.h>
#include <unistd.h>

#include "child.h"
#include "engine.h"
#include "wire.h"

enum { KEYS = 8, LENGTH = 1 << 16 };

/* The server: one request a connection. */
static struct {
    int listener, port;
    _Atomic int silent;
    char keys[KEYS][128], values[KEYS][LENGTH];
    pthread_mutex_t lock;
} server = {.lock = PTHREAD_MUTEX_INITIALIZER};

static int place_of(const char *key) {
    int found = -1;
    for (int i = 0; i < KEYS; i++)
        if (strcmp(server.keys[i], key) == 0) return i;
    for (int i = KEYS - 1; i >= 0; i--)
        if (*server.keys[i] == 0) found = i;
    CHECK(found >= 0);
    return found;
}

static void serve(int fd) {
    static char request[LENGTH + 4096], reply[LENGTH + 4096];
    char method[8], target[512];
    size_t have = 0, length = 0;
    char *body = NULL;
    while (body == NULL || have < (size_t)(body - request) + length) {
        ssize_t got = recv(fd, request + have, sizeof request - have - 1, 0);
        if (got <= 0) return;
        have += (size_t)got;
        request[have] = 0;
        if (body == NULL && (body = strstr(request, "\r\n\r\n")) != NULL) {
            body += 4;
            for (char *line = request; line < body; line = strchr(line, '\n') + 1)
                if (strncasecmp(line, "content-length:", 15) == 0) length = strtoul(line + 15, NULL, 10);
        }
    }
    body[length] = 0;
    if (server.silent) {
        recv(fd, method, 1, 0);
        return;
    }
    CHECK(sscanf(request, "%7s %511s", method, target) == 2);
    char *key = strstr(target, "key=");
    CHECK(key != NULL);
    int place = place_of(key + 4), is_there = *server.keys[place] != 0;
    const char *answer = "";
    if (strcmp(method, "PUT") == 0) {
        CHECK(strlen(key + 4) < sizeof server.keys[0] && length < LENGTH);
        strcpy(server.keys[place], key + 4);
        memcpy(server.values[place], body, length + 1);
        is_there = 1;
    } else if (strcmp(method, "DELETE") == 0) {
        *server.keys[place] = 0;
    } else {
        answer = is_there ? server.values[place] : "not found";
    }
    int size = snprintf(reply, sizeof reply, "HTTP/1.1 %s\r\nContent-Length: %zu\r\nConnection: close\r\n\r\n%s",
                        is_there ? "200 OK" : "404 Not Found", strlen(answer), answer);
    send_all(fd, reply, (size_t)size);
}

static void *run_server(void *unused) {
    (void)unused;
    for (;;) {
        int fd = accept(server.listener, NULL, NULL);
        if (fd < 0) return NULL;
        pthread_mutex_lock(&server.lock);
        serve(fd);
        pthread_mutex_unlock(&server.lock);
        close(fd);
    }
}

static te_store *open_store(void) {
    char uri[64];
    te_store *store = NULL;
    snprintf(uri, sizeof uri, "http://127.0.0.1:%d/metadata", server.port);
    OK(te_store_open(uri, &store));
    return store;
}

static void texts_are_put_got_and_removed(void) {
    static char text[LENGTH];
    te_store *store = open_store();
    char *value = text;
    OK(te_store_get(store, "a", &value));
    CHECK(value == NULL);
    OK(te_store_put(store, "a", "{\"x\":1}"));
    OK(te_store_get(store, "a", &value));
    CHECK(strcmp(value, "{\"x\":1}") == 0);
    te_free_text(value);
    memset(text, 'x', sizeof text - 16);
    OK(te_store_put(store, "a", text));
    OK(te_store_get(store, "a", &value));
    CHECK(strcmp(value, text) == 0);
    te_free_text(value);
    OK(te_store_remove(store, "a"));
    OK(te_store_remove(store, "a"));
    OK(te_store_get(store, "a", &value));
    CHECK(value == NULL);
    OK(te_store_close(store));
}

/* The keys of an engine, seen from outside and while it lives. */
static void keys_of_an_engine_are_found_and_published_again(void) {
    static char memory[64];
    char uri[64], *value = NULL;
    te_engine_options options;
    te_engine *engine = NULL;
    te_store *store = open_store();
    te_memory_options later = make_memory_options();
    later.publish = TE_PUBLISH_LATER;
    snprintf(uri, sizeof uri, "http://127.0.0.1:%d/metadata", server.port);
    memset(&options, 0, sizeof options);
    options.struct_size = sizeof options;
    options.metadata = uri;
    options.server_name = "node";
    OK(setenv("MC_TCP_BIND_ADDRESS", "127.0.0.1", 1));
    OK(te_engine_create(&options, &engine));
    /* As the test's server keeps them, escaped. */
    const char *const address = "mooncake/rpc_meta/node";
    OK(te_store_get(store, address, &value));
    CHECK(value != NULL && strstr(value, "rpc_port") != NULL);
    te_free_text(value);
    OK(te_store_remove(store, address));
    OK(te_publish_address(engine));
    OK(te_store_get(store, address, &value));
    CHECK(value != NULL);
    te_free_text(value);
    OK(te_register_local_memory(engine, memory, sizeof memory, &later));
    OK(te_store_get(store, "mooncake/ram/node", &value));
    CHECK(value != NULL && strstr(value, "\"addr\"") == NULL);
    te_free_text(value);
    OK(te_publish(engine));
    OK(te_store_get(store, "mooncake/ram/node", &value));
    CHECK(value != NULL && strstr(value, "\"addr\"") != NULL);
    te_free_text(value);
    OK(te_engine_destroy(engine));
    OK(te_store_get(store, address, &value));
    CHECK(value == NULL);
    OK(te_store_close(store));
}

static te_store *used;
static void *ask_used(void *unused) {
    (void)unused;
    char *value = NULL;
    double start = now();
    REFUSED(te_store_get(used, "a", &value));
    CHECK(now() - start < 8);
    return NULL;
}

static void a_server_that_is_away_or_silent_is_an_error_in_time(void) {
    char *value = (char *)&server;
    te_store *store = NULL;
    pthread_t thread;
    OK(te_store_open("http://127.0.0.1:1/metadata", &store));
    EXPECT(TE_ERR_METADATA, te_store_get(store, "a", &value));
    EXPECT(TE_ERR_METADATA, te_store_put(store, "a", "1"));
    EXPECT(TE_ERR_METADATA, te_store_remove(store, "a"));
    CHECK(value == (char *)&server);
    OK(te_store_close(store));
    /* Closing waits for who is inside, and refuses who comes later. */
    server.silent = 1;
    used = open_store();
    OK(pthread_create(&thread, NULL, ask_used, NULL));
    usleep(100000);
    double start = now();
    OK(te_store_close(used));
    CHECK(now() - start < 8);
    OK(pthread_join(thread, NULL));
    server.silent = 0;
    EXPECT(TE_ERR_INVALID_HANDLE, te_store_close(used));
}

static void nothing_is_left_of_a_store_that_was_closed(void) {
    texts_are_put_got_and_removed();
    int files = count_entries("/proc/self/fd"), threads = count_entries("/proc/self/task");
    for (int i = 0; i < 20; i++)
        texts_are_put_got_and_removed();
    /* The server may not have closed its last connection when they were counted. */
    expect_at_most_entries(files, "/proc/self/fd");
    expect_at_most_entries(threads, "/proc/self/task");
}

static void use_in_child(void *parents) {
    char *value = NULL;
    EXPECT(TE_ERR_FORKED, te_store_get(parents, "a", &value));
    EXPECT(TE_ERR_FORKED, te_store_close(parents));
}

static void bad_arguments_are_refused(void) {
    te_store *store = open_store(), *dead = open_store(), *none = NULL;
    te_engine *engine = create_engine();
    char *value = NULL;
    OK(te_store_close(dead));
    te_store *const bad[] = {NULL, dead, (te_store *)engine, (te_store *)&value};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        REFUSED(te_store_get(bad[i], "a", &value));
        REFUSED(te_store_put(bad[i], "a", "1"));
        REFUSED(te_store_remove(bad[i], "a"));
        if (bad[i] != NULL) REFUSED(te_store_close(bad[i]));
    }
    OK(te_store_close(NULL));
    const char *const uris[] = {NULL, "", "P2PHANDSHAKE", "nothing://127.0.0.1:1", "http://"};
    for (size_t i = 0; i < sizeof uris / sizeof *uris; i++)
        REFUSED(te_store_open(uris[i], &none));
    REFUSED(te_store_open("http://127.0.0.1:1", NULL));
    CHECK(none == NULL);
    REFUSED(te_store_get(store, NULL, &value));
    REFUSED(te_store_get(store, "a", NULL));
    REFUSED(te_store_put(store, NULL, "1"));
    REFUSED(te_store_put(store, "a", NULL));
    REFUSED(te_store_remove(store, NULL));
    in_child(use_in_child, store);
    OK(te_store_close(store));
    OK(te_engine_destroy(engine));
}

int main(void) {
    pthread_t thread;
    server.listener = listen_somewhere(&server.port);
    OK(pthread_create(&thread, NULL, run_server, NULL));
    texts_are_put_got_and_removed();
    keys_of_an_engine_are_found_and_published_again();
    a_server_that_is_away_or_silent_is_an_error_in_time();
    nothing_is_left_of_a_store_that_was_closed();
    bad_arguments_are_refused();
    shutdown(server.listener, SHUT_RDWR);
    OK(pthread_join(thread, NULL));
    close(server.listener);
    return 0;
}
