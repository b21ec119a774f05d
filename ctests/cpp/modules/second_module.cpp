// The module that is given the engine, as upstream's "store".
#include <config.h>
#include <transfer_engine.h>

#include <cstring>

#include "module.hpp"

using namespace mooncake;

EXPORTED bool use_engine(Handed handed) {
    auto* reference = static_cast<std::shared_ptr<TransferEngine>*>(handed.engine);
    std::shared_ptr<TransferEngine> engine = std::move(*reference);
    delete reference;

    bool good = Transport::toBatchDesc(handed.batch).start_timestamp == 4711;
    std::vector<char> memory(8192);
    std::memset(memory.data(), 'x', 4096);
    good = good && engine->registerLocalMemory(memory.data(), memory.size()) == 0;
    const SegmentHandle segment = engine->openSegment(engine->getLocalIpAndPort());
    const Status status = engine->submitTransfer(
        handed.batch, {{TransferRequest::WRITE, memory.data(), segment, reinterpret_cast<std::uint64_t>(memory.data()) + 4096, 4096}});
    TransferStatus progress{TransferStatusEnum::WAITING, 0};
    while (status.ok() && (progress.s == TransferStatusEnum::WAITING || progress.s == TransferStatusEnum::PENDING)) {
        if (!engine->getTransferStatus(handed.batch, 0, progress).ok()) break;
    }
    good = good && progress.s == TransferStatusEnum::COMPLETED && memory[8191] == 'x';
    good = good && engine->freeBatchID(handed.batch).ok() && engine->unregisterLocalMemory(memory.data()) == 0;
    return good && engine.use_count() == 1;
}

EXPORTED void* configuration() { return &globalConfig(); }
EXPORTED unsigned long read_configuration(bool size) {
    return size ? globalConfig().max_mr_size : globalConfig().ascend_use_fabric_mem;
}
EXPORTED const std::type_info* engine_type() { return &typeid(TransferEngine); }
