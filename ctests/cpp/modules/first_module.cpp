// The module that makes the engine, as upstream's "engine".
#include <config.h>
#include <transfer_engine.h>

#include <cstdlib>

#include "module.hpp"

using namespace mooncake;

static std::shared_ptr<TransferEngine> mine;

EXPORTED Handed make_engine() {
    mine = std::make_shared<TransferEngine>();
    if (mine->init(P2PHANDSHAKE, "127.0.0.1") != 0 || mine->installTransport("tcp", nullptr) == nullptr) std::abort();
    const BatchID batch = mine->allocateBatchID(1);
    Transport::toBatchDesc(batch).start_timestamp = 4711;
    return {new std::shared_ptr<TransferEngine>(mine), batch};
}

EXPORTED void release() { mine.reset(); }
EXPORTED void* configuration() { return &globalConfig(); }
EXPORTED void write_configuration(bool flag, unsigned long size) {
    globalConfig().ascend_use_fabric_mem = flag;
    globalConfig().max_mr_size = size;
}
EXPORTED const std::type_info* engine_type() { return &typeid(TransferEngine); }
