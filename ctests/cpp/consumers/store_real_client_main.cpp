// The program of the store's real client: flags of the configuration before there is an engine, defaults of flags of its own.
#include <config.h>
#include <transfer_engine.h>

#include "check.hpp"
#include "processes.hpp"

using namespace mooncake;

// As the default of a flag, before main() begins.
static const std::string host_of_flag = getHostNameWithoutPort("localhost:50052");
static const std::string location_of_flag = kWildcardLocation;

static void flags_are_set_before_there_is_an_engine() {
    EXPECT(std::string("localhost"), host_of_flag);
    EXPECT(std::string("*"), location_of_flag);
    globalConfig().ascend_agent_mode = true;
    TransferEngine engine;
    processes::start(engine);
    REQUIRE(globalConfig().ascend_agent_mode);
}

int main(int argc, char** argv) {
    return processes::run(argc, argv, [] { flags_are_set_before_there_is_an_engine(); }, processes::serve);
}
