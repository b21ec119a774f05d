// The store's helper for shared memory includes the configuration, and uses nothing of it where there is no vendor's device.
#include <config.h>

#include "check.hpp"

static void the_header_stands_alone() { REQUIRE(&mooncake::globalConfig() == &mooncake::globalConfig()); }

int main() { the_header_stands_alone(); }
