// The store's utilities take the port off names.
#include <common.h>

#include "check.hpp"

using namespace mooncake;

static_assert(std::is_same_v<decltype(getHostNameWithoutPort("")), std::string>);

static void hosts_are_what_is_before_the_port() {
    EXPECT(std::string("10.0.0.1"), getHostNameWithoutPort("10.0.0.1:12345"));
    EXPECT(std::string("fe80::1%eth0"), getHostNameWithoutPort("[fe80::1%eth0]:12345"));
    EXPECT(std::string("node-a.example"), getHostNameWithoutPort("node-a.example"));
}

int main() { hosts_are_what_is_before_the_port(); }
