/* te.h: memory of a device is not copied by the host. A library stands for its driver, and pages without access for its memory. */
#include <dlfcn.h>
#include <sys/mman.h>

#include "engine.h"
#include "peer.h"

enum { LENGTH = 64 << 10 };

static void memory_of_a_device_is_not_copied_by_the_host(void) {
    struct peer peer;
    te_segment segment;
    te_pool *pool;
    te_pool_statistics statistics;
    te_pool_transfer_options options;
    te_transfer_result results[2];
    static unsigned char bytes[LENGTH];
    peer_start(&peer);
    te_engine *engine = create_engine();
    OK(te_open_segment(engine, peer.address, &segment));
    OK(te_pool_create(engine, NULL, &pool));
    unsigned char *device = mmap(NULL, LENGTH, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(device != MAP_FAILED);

    te_pool_item items[2] = {{device, LENGTH, segment, peer.base}, {bytes, LENGTH, segment, peer.base + LENGTH}};
    memset(&options, 0, sizeof options);
    options.struct_size = sizeof options;
    options.path = TE_POOL_STAGED;
    /* Before it is loaded nothing is a device's. */
    OK(te_put(engine, pool, &items[1], sizeof *items, 1, &options, NULL, 0));
    void *driver = dlopen(DRIVER, RTLD_NOW | RTLD_LOCAL);
    CHECK(driver != NULL);
    void (*own)(void *, size_t);
    *(void **)&own = dlsym(driver, "fake_cuda_own");
    CHECK(own != NULL);
    own(device, LENGTH);

    /* TCP has no access to it, and says so; a copy would have ended the process. */
    EXPECT(TE_ERR_FAULT, te_put(engine, pool, items, sizeof *items, 2, &options, results, sizeof *results));
    CHECK(strstr(te_last_error(), "GPU") != NULL);
    EXPECT(TE_STATE_FAILED, results[0].state);
    EXPECT(TE_STATE_COMPLETED, results[1].state);
    memset(&statistics, 0, sizeof statistics);
    statistics.struct_size = sizeof statistics;
    OK(te_pool_stats(pool, &statistics));
    EXPECT(1, statistics.items_direct);
    EXPECT(2, statistics.items_staged);
    OK(te_pool_close(pool, 0));
    OK(te_engine_destroy(engine));
    peer_end(&peer);
}

int main(void) {
    memory_of_a_device_is_not_copied_by_the_host();
    return 0;
}
