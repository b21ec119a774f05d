// The types of a transfer: requests, their states, and the batch that they belong to.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common/base/status.h"
#include "transfer_engine_cxx/export.h"
#include "transfer_metadata.h"

namespace mooncake {

// An installed transport. It belongs to its engine; programs compare its address with nullptr and read nothing
// from it. The types of transfers are nested in it.
class TRANSFER_ENGINE_CXX_API Transport {
   public:
    using SegmentID = uint64_t;
    using SegmentHandle = SegmentID;
    // The address of a BatchDesc.
    using BatchID = uint64_t;

    using BufferDesc = TransferMetadata::BufferDesc;
    using SegmentDesc = TransferMetadata::SegmentDesc;
    using HandShakeDesc = TransferMetadata::HandShakeDesc;
    using NotifyDesc = TransferMetadata::NotifyDesc;

    // Moves `length` bytes between a range of this process and one of a segment.
    struct TransferRequest {
        // READ: from the segment into local memory; WRITE: the other way.
        enum OpCode { READ = 0, WRITE = 1 };
        // A request that belongs to no group.
        static constexpr uint64_t kNoTaskGroup = 0;

        OpCode opcode;
        // First byte of the local range. The memory is the engine's until the request is over.
        void* source;
        SegmentID target_id;
        // First byte of the other range, an address in the process of the segment.
        uint64_t target_offset;
        size_t length;
        // How often the caller has tried before: each try takes another NIC, where there are several.
        int advise_retry_cnt = 0;
        int transport_hint = 0;
        // Requests of one batch with the same number stay on one path, in order, where the transport can do that.
        uint64_t task_group_id = kNoTaskGroup;
    };

    // COMPLETED and FAILED are final, and so is TIMEOUT, which is shown only where MC_SLICE_TIMEOUT is set.
    // The engine touches no memory of a request after its end.
    enum TransferStatusEnum { WAITING = 0, PENDING = 1, INVALID = 2, CANCELED = 3, COMPLETED = 4, TIMEOUT = 5, FAILED = 6 };

    struct TransferStatus {
        TransferStatusEnum s;
        // Bytes that are known to have moved.
        size_t transferred_bytes;
    };

    struct BufferEntry {
        void* addr;
        size_t length;
    };

    struct NicLoadStats {
        std::string device_name;
        uint64_t inflight_bytes = 0;
        double ewma_bandwidth_bps = 0;
    };

    // A part of a request. A request has one, of all its bytes, however many parts the engine moves it in.
    struct Slice {
        enum SliceStatus { PENDING = 0, POSTED = 1, SUCCESS = 2, TIMEOUT = 3, FAILED = 4 };

        size_t length = 0;
        SliceStatus status = PENDING;
    };

    // What has become of a request, as it was when it was last asked for or the engine was destroyed. Other threads
    // write it meanwhile: read the numbers by __atomic_load_n.
    struct TransferTask {
        volatile uint64_t slice_count = 0;
        volatile uint64_t success_slice_count = 0;
        volatile uint64_t failed_slice_count = 0;
        volatile uint64_t transferred_bytes = 0;
        volatile bool is_finished = false;
        uint64_t total_bytes = 0;
        BatchID batch_id = 0;
        const TransferRequest* request = nullptr;
        size_t request_count = 1;
        // The slices belong to the batch.
        std::vector<Slice*> slice_list;
    };

    // A batch. TransferEngine::allocateBatchID makes it, by plain new, and freeBatchID frees it; the engine does not,
    // not even at its end, so that the record of a batch that was not freed outlives the engine. It may be
    // deleted then.
    struct BatchDesc {
        BatchID id = 0;
        // How many requests it has room for.
        size_t batch_size = 0;
        // One for each request that was submitted. Is never moved.
        std::vector<TransferTask> task_list;
        // The batch's number in te.h: a te_batch.
        void* context = nullptr;
        // The program's: the engine neither reads nor writes it.
        int64_t start_timestamp = 0;
        std::atomic<bool> has_failure = false;
        std::atomic<bool> is_finished = false;
        std::atomic<uint64_t> finished_transfer_bytes = 0;
        // Notified when all requests are over, in programs that are compiled with USE_EVENT_DRIVEN_COMPLETION; `is_finished` is set under
        // the mutex then. They are here in others, too, so that both have one layout.
        std::atomic<uint64_t> finished_task_count = 0;
        std::mutex completion_mutex;
        std::condition_variable completion_cv;
        // The library's.
        std::shared_ptr<void> storage;
    };

    static BatchDesc& toBatchDesc(BatchID batch_id) { return *reinterpret_cast<BatchDesc*>(batch_id); }

    Transport(const Transport&) = delete;
    Transport& operator=(const Transport&) = delete;
    virtual ~Transport();

   protected:
    Transport() = default;
};

namespace transfer_engine_cxx {

// Has engines that are initialised from now on notify of batches that are over.
TRANSFER_ENGINE_CXX_API bool notify_completions();
#ifdef USE_EVENT_DRIVEN_COMPLETION
static const bool completions_are_notified_here = notify_completions();
#endif

}  // namespace transfer_engine_cxx

}  // namespace mooncake
