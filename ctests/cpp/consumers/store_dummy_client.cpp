// The store's dummy client: flags of the process's configuration, which vendors' transports act on.
#include <config.h>
#include <transfer_engine.h>

#include "check.hpp"

using namespace mooncake;

static_assert(std::is_same_v<decltype(GlobalConfig::ascend_use_fabric_mem), bool>);
static_assert(std::is_same_v<decltype(GlobalConfig::ascend_agent_mode), bool>);

static void flags_are_off_and_stay_as_they_are_written() {
    REQUIRE(!globalConfig().ascend_use_fabric_mem && !globalConfig().ascend_agent_mode);
    globalConfig().ascend_use_fabric_mem = true;
    GlobalConfig& config = globalConfig();
    config.ascend_agent_mode = true;
    REQUIRE(globalConfig().ascend_use_fabric_mem && globalConfig().ascend_agent_mode);
    EXPECT(std::string("*"), kWildcardLocation);
}

int main() { flags_are_off_and_stay_as_they_are_written(); }
