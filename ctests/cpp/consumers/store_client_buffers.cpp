// The store's buffers of clients include headers of allocators of vendors, and call none.
#include <config.h>
#include <ub_allocator.h>
#include <transfer_engine.h>

#include "check.hpp"

using namespace mooncake;

static void limits_of_a_registration_are_terabytes() {
    EXPECT(0x10000000000u, globalConfig().max_mr_size);
    EXPECT(0x10000000000u, globalConfig().max_seg_size);
}

int main() { limits_of_a_registration_are_terabytes(); }
