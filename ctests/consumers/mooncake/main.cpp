// Uses upstream's C++ class as installed: every header, and a little of what the library, its headers and the packages they bring have.
#include <glog/logging.h>

#include "char_util.h"
#include "common.h"
#include "config.h"
#include "cuda_alike.h"
#include "error.h"
#include "memory_location.h"
#include "multi_transport.h"
#include "shared_segment/shared_segment.h"
#include "show_links.h"
#include "topology.h"
#include "transfer_engine.h"
#include "transfer_engine_c.h"
#include "transfer_metadata.h"
#include "transfer_metadata_plugin.h"
#include "transport/rdma_transport/rdma_transport.h"
#include "transport/transport.h"
#include "ub_allocator.h"

int main() {
    mooncake::Topology topology;
    CHECK_EQ(topology.parse(R"({"cpu:0":[["a"],["b"]]})"), 0);
    CHECK(topology.getHcaList() == std::vector<std::string>({"a", "b"}));
    CHECK_EQ(topology.parse("{"), ERR_MALFORMED_JSON) << "and the matrix stays:" << topology.toString();
#ifdef TRANSFER_ENGINE_HAS_JSONCPP
    CHECK_EQ(topology.toJson()["cpu:0"][1][0].asString(), "b");
#endif

    mooncake::globalConfig().ascend_agent_mode = true;
    CHECK(mooncake::globalConfig().ascend_agent_mode);
    CHECK(!mooncake::SharedSegment::Supported());

    mooncake::TransferEngine engine;
    CHECK_EQ(engine.init(P2PHANDSHAKE, "127.0.0.1"), 0);
    CHECK(engine.installTransport("tcp", nullptr) != nullptr);
    CHECK(mooncake::hasExplicitPort(engine.getLocalIpAndPort()));
    LOG(INFO) << "moves bytes at " << engine.getLocalIpAndPort();
    return 0;
}
