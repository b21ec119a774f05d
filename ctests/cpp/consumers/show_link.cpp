// The program among the examples that shows links, with and without an engine that works, and twice freed.
#include <show_links.h>
#include <transfer_engine.h>

#include "check.hpp"
#include "processes.hpp"

using namespace mooncake;

static_assert(std::is_same_v<decltype(std::declval<const TransferEngine&>().showLinks()), std::string>);

static void links_are_shown() {
    TransferEngine engine(false);
    auto topology = engine.getLocalTopology();
    topology->discover({});
    REQUIRE(engine.showLinks(false).find("=== Local NICs ===") != std::string::npos);
    SUCCEEDS(engine.init(P2PHANDSHAKE, processes::host()));
    processes::install(engine);
    const TransferEngine& shown = engine;
    const std::string text = shown.showLinks(), json = shown.showLinks(true);
    REQUIRE(text.find("=== Local NICs ===") != std::string::npos);
    REQUIRE(json.find("local_nics") != std::string::npos && json.find("topology") != std::string::npos);
    SUCCEEDS(engine.freeEngine());
    SUCCEEDS(engine.freeEngine());
}

int main(int argc, char** argv) {
    return processes::run(argc, argv, [] { links_are_shown(); }, processes::serve);
}
