// One submission of many requests, by the class and by the C function beneath it, of the same engine: what is measured and counted.
#pragma once

#include <te.h>
#include <transfer_engine.h>

#include <vector>

#include "check.hpp"

// Writes of 8 bytes within the own segment, which are over when submitting returns.
class Submission {
public:
    explicit Submission(std::size_t count) : memory_(2 * 8 * count), count_(count) {
        SUCCEEDS(engine_.init(P2PHANDSHAKE, "127.0.0.1"));
        REQUIRE(engine_.installTransport("tcp", nullptr) != nullptr);
        SUCCEEDS(engine_.registerLocalMemory(memory_.data(), memory_.size()));
        const auto remote = reinterpret_cast<std::uint64_t>(memory_.data()) + 8 * count;
        for (std::size_t i = 0; i < count; i++) {
            by_class_.push_back({mooncake::TransferRequest::WRITE, memory_.data() + 8 * i, mooncake::LOCAL_SEGMENT_ID, remote + 8 * i, 8});
            te_transfer_request request{};
            request.opcode = TE_WRITE;
            request.local = memory_.data() + 8 * i;
            request.segment = TE_LOCAL_SEGMENT;
            request.remote_addr = remote + 8 * i;
            request.length = 8;
            by_c_.push_back(request);
        }
    }
    ~Submission() { SUCCEEDS(engine_.unregisterLocalMemory(memory_.data())); }

    // What is called right before and after the submission alone: not when its batch is made, looked at, and freed.
    template <class Before, class After>
    void run_by_class(Before before, After after) {
        const mooncake::BatchID batch = engine_.allocateBatchID(count_);
        before();
        const mooncake::Status status = engine_.submitTransfer(batch, by_class_);
        after();
        SUCCEEDS(status);
        for (std::size_t i = 0; i < count_; i++) {
            mooncake::TransferStatus progress;
            do SUCCEEDS(engine_.getTransferStatus(batch, i, progress));
            while (progress.s == mooncake::TransferStatusEnum::WAITING);
            EXPECT(mooncake::TransferStatusEnum::COMPLETED, progress.s);
        }
        SUCCEEDS(engine_.freeBatchID(batch));
    }

    template <class Before, class After>
    void run_by_c(Before before, After after) {
        te_batch batch = 0;
        SUCCEEDS(te_batch_create(handle(), count_, &batch));
        before();
        const te_status status = te_batch_submit(handle(), batch, by_c_.data(), sizeof by_c_[0], count_, nullptr);
        after();
        SUCCEEDS(status);
        SUCCEEDS(te_batch_wait(handle(), batch, 60000, nullptr));
        SUCCEEDS(te_batch_free(handle(), batch));
    }

private:
    // The address of the object is a handle of its engine.
    te_engine* handle() { return reinterpret_cast<te_engine*>(&engine_); }

    mooncake::TransferEngine engine_;
    std::vector<unsigned char> memory_;
    std::size_t count_;
    std::vector<mooncake::TransferRequest> by_class_;
    std::vector<te_transfer_request> by_c_;
};
