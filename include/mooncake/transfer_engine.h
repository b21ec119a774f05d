// Upstream's class of the Transfer Engine, over this library.
//
// An engine registers memory of this process, opens the segments of its peers, and moves bytes between both. Programs
// that were written for Mooncake's class compile and link with this one as they are.
//
// Errors. Functions that return int give 0 or a negative ERR_ number (error.h, and te.h for those below -1000); those
// that return Status say why in its text. Nothing throws.
//
// Threads. A program makes, sets up, initialises, moves and destroys an engine by itself. After init any thread may
// call any function, and different batches are independent; requests are submitted to one batch by one thread at a
// time, and a batch is freed by who uses it last.
#pragma once

#include <sys/mman.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "common.h"
#include "common/base/status.h"
#include "error.h"
#include "memory_location.h"
#include "multi_transport.h"
#include "topology.h"
#include "transfer_metadata.h"
#include "transfer_engine_cxx/export.h"
#include "transport/transport.h"

namespace mooncake {

using TransferRequest = Transport::TransferRequest;
using TransferStatus = Transport::TransferStatus;
using TransferStatusEnum = Transport::TransferStatusEnum;
using SegmentHandle = Transport::SegmentHandle;
using SegmentID = Transport::SegmentID;
using BatchID = Transport::BatchID;
using BufferEntry = Transport::BufferEntry;
using NicLoadStats = Transport::NicLoadStats;

// What allocateBatchID returns when it fails.
const static BatchID INVALID_BATCH_ID = UINT64_MAX;

enum class PeerLiveness : uint8_t { Alive = 0, Unreachable = 1 };

// Whether init installs the best transport there is.
struct AutoDiscoverConfig {
    bool enabled = false;
    // "efa" asks for that transport, which this library does not have. With any other text the hardware decides.
    std::string protocol;
};

// An engine.
//
// It has two steps: made, it has a topology and settings; init starts it. Its address, cast, serves as a handle of the C interfaces. One
// that was moved from may be destroyed or assigned to, no more.
class TRANSFER_ENGINE_CXX_API TransferEngine {
   public:
    // Fragments between one local buffer and one range of a segment.
    struct ScatterTransferRange {
        TransferRequest::OpCode opcode;
        std::string remote_segment;
        // The address at which the range begins in the process of the segment.
        uint64_t remote_base_offset;
        size_t remote_size;
        void* local_buffer;
        size_t local_capacity;
        // Of each fragment: where it begins in the local buffer and in the range, and its length. They must stay
        // valid until the operation is destroyed.
        std::span<const size_t> local_offsets;
        std::span<const size_t> remote_offsets;
        std::span<const size_t> lengths;
        // Called once for each fragment, with its index and how it ended, on the thread that submits or waits.
        std::function<void(size_t, const Status&)> on_fragment_complete;
    };

    // Scattered transfers under way. One thread uses it. Destroying it waits for their end.
    class ScatterTransferOperation {
       public:
        ScatterTransferOperation(ScatterTransferOperation&&) noexcept;
        ScatterTransferOperation& operator=(ScatterTransferOperation&&) noexcept;
        ScatterTransferOperation(const ScatterTransferOperation&) = delete;
        ScatterTransferOperation& operator=(const ScatterTransferOperation&) = delete;
        ~ScatterTransferOperation();

        // Waits until all fragments are over. The status of the first that has not completed, else OK.
        Status wait();
        // The same for a limited time. Clock if fragments are still under way then, and only then.
        Status waitFor(std::chrono::nanoseconds timeout);

       private:
        friend class TransferEngine;
        class State;
        explicit ScatterTransferOperation(std::unique_ptr<State> state);
        std::unique_ptr<State> state_;
    };

    // Makes an engine that init starts. `auto_discover` has init install the best transport there is, and
    // `filter` names the NICs that it may use; none stands for all.
    TransferEngine(bool auto_discover = false);
    TransferEngine(bool auto_discover, const std::vector<std::string>& filter);
    TransferEngine(TransferEngine&& other) noexcept;
    TransferEngine& operator=(TransferEngine&& other) noexcept;
    TransferEngine(const TransferEngine&) = delete;
    TransferEngine& operator=(const TransferEngine&) = delete;
    // As freeEngine.
    ~TransferEngine();

    // Starts the engine. `local_server_name` is "host" or "host:port" of this machine with P2PHANDSHAKE, else the name
    // that peers open. The last two parameters have no effect.
    int init(const std::string& metadata_conn_string, const std::string& local_server_name,
             const std::string& ip_or_host_name = "", uint64_t rpc_port = 12345);
    // Ends it: transfers that still run are cancelled, memory is unregistered, and peers are not served any more. From
    // now on functions that need the engine fail; what only looks something up may find nothing instead. Waits for
    // scattered transfers: it is their last end that ends the engine.
    int freeEngine();

    // Null on failure. `args` may be null; else its first element is a NIC priority matrix in JSON, or null.
    Transport* installTransport(const std::string& proto, void** args);
    // ERR_NOT_IMPLEMENTED: transports stay until the end of the engine.
    int uninstallTransport(const std::string& proto);
    // Null if it is not installed.
    Transport* getTransport(const std::string& proto);

    // The address at which peers reach this engine, "host:port"; "" before init.
    std::string getLocalIpAndPort();
    int getRpcPort();
    bool isUsingTent() const;

    // All ones, that is (SegmentHandle)-1, on failure.
    SegmentHandle openSegment(const std::string& segment_name);
    Status CheckSegmentStatus(SegmentID segment_id);
    // Does nothing; 0 also for a segment that has been removed. The number of one that has not stays valid.
    int closeSegment(SegmentHandle segment_id);
    // Forgets what is known here of the segment of that name, whichever process it is of.
    int removeLocalSegment(const std::string& segment_name);
    int syncSegmentCache(const std::string& segment_name = "");

    // With `update_metadata` false, peers learn of the change with the next that is published, or by
    // getMetadata()->updateLocalSegmentDesc(). Memory that is unregistered is taken from peers at once all
    // the same, lest they ask for it; that a metadata server cannot be told is no failure then.
    int registerLocalMemory(void* addr, size_t length, const std::string& location = kWildcardLocation,
                            bool remote_accessible = true, bool update_metadata = true);
    int unregisterLocalMemory(void* addr, bool update_metadata = true);
    // All of them or, on failure, none.
    int registerLocalMemoryBatch(const std::vector<BufferEntry>& buffer_list, const std::string& location);
    // All that can be; the first failure is returned.
    int unregisterLocalMemoryBatch(const std::vector<void*>& addr_list);
    // Whether a byte of the range is registered.
    bool checkOverlap(void* addr, uint64_t length);

    // Makes a batch with room for `batch_size` requests. INVALID_BATCH_ID on failure. The number is the address of a
    // Transport::BatchDesc.
    BatchID allocateBatchID(size_t batch_size);
    // BatchBusy while a request is under way; the batch stays as it is then.
    Status freeBatchID(BatchID batch_id);
    // Starts requests: all or, on failure, none.
    Status submitTransfer(BatchID batch_id, const std::vector<TransferRequest>& entries);
    // The same, and sends a message to the engine of the first request's segment when all have completed.
    Status submitTransferWithNotify(BatchID batch_id, const std::vector<TransferRequest>& entries,
                                    TransferMetadata::NotifyDesc notify_msg);
    Status getTransferStatus(BatchID batch_id, size_t task_id, TransferStatus& status);
    // COMPLETED when all requests have, FAILED when all are over and one has not, else WAITING.
    Status getBatchTransferStatus(BatchID batch_id, TransferStatus& status);

    // Starts scattered transfers. What is wrong with a fragment ends that fragment only.
    ScatterTransferOperation submitScatter(const std::vector<ScatterTransferRange>& ranges);
    // The same, and waits.
    Status transferScatter(const std::vector<ScatterTransferRange>& ranges);

    // Appends the messages that have arrived.
    int getNotifies(std::vector<TransferMetadata::NotifyDesc>& notifies);
    int sendNotifyByID(SegmentID target_id, TransferMetadata::NotifyDesc notify_msg);
    int sendNotifyByName(std::string remote_agent, TransferMetadata::NotifyDesc notify_msg);
    // Asks the peer.
    PeerLiveness probePeerAliveByID(SegmentID target_id);

    Status getNicLoadStats(std::vector<NicLoadStats>& stats) const;
    // Whether "tcp" is the only transport that is installed.
    bool isTcpOnly() const;
    std::shared_ptr<TransferMetadata> getMetadata();
    // The topology by which this engine chooses NICs. What is done to it before a transport is installed decides
    // what the transport uses.
    std::shared_ptr<Topology> getLocalTopology();
    std::string getLocalTopologyString();
    // Before init.
    void setAutoDiscover(bool auto_discover);
    void setAutoDiscover(const AutoDiscoverConfig& config);
    void setWhitelistFilters(std::vector<std::string>&& filters);
    // Null: there is no CXL memory.
    void* getBaseAddr();
    // How many NICs the topology has.
    int numContexts() const;
    // The NICs and which of them serves which memory, in JSON or for people.
    std::string showLinks(bool json = false) const;
    // From now on the engine is shut down when the process ends by exit(), SIGTERM or SIGINT.
    void enableGracefulShutdown();

   private:
    class State;
    std::unique_ptr<State> state_;
};

}  // namespace mooncake
