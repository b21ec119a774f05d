// An engine of the C interface, and the batches of the class that are alive on it.
//
// Who holds the Core: the TransferEngine, and each scattered operation, so that the last of them destroys the engine. An
// engine that is freed while operations are under way is shut down by the end of the last.
//
// Batches. A BatchID is the address of a BatchDesc, which keeps the number of its batch of the C interface in `context`. The Core knows
// which are alive, in order to write down how their requests ended before the engine goes; it never frees one, since the program may
// look at its batch later.
//
// Locks: `lock_`, around the list of batches and shutting down. Asking for a status and submitting take none.
#pragma once

#include <te.h>

#include <atomic>
#include <memory>
#include <mutex>

#include "completion.h"
#include "topology.h"
#include "transport/transport.h"

namespace mooncake::transfer_engine_cxx {

// A place in a ring.
struct Link {
    Link* previous = this;
    Link* next = this;

    void insert_before(Link* other) {
        previous = other->previous;
        next = other;
        previous->next = next->previous = this;
    }
    void remove() {
        previous->next = next;
        next->previous = previous;
        previous = next = this;
    }
};

struct DestroyEngine {
    void operator()(te_engine* engine) const { te_engine_destroy(engine); }
};
using OwnEngine = std::unique_ptr<te_engine, DestroyEngine>;

class Core {
   public:
    // The engine chooses NICs by that topology. Throws std::system_error if the system lacks descriptors or threads.
    Core(OwnEngine engine, std::shared_ptr<Topology> topology);
    Core(const Core&) = delete;
    Core& operator=(const Core&) = delete;
    ~Core();

    te_engine* engine() const { return engine_.get(); }

    // Null if it cannot be had.
    Transport::BatchDesc* allocate(size_t capacity);
    // Frees a batch that is over.
    Status free(Transport::BatchDesc* batch);

    void operation_begins() { operations_.fetch_add(1); }
    void operation_ends();
    // Ends the engine, at once or with the last operation.
    void close();

   private:
    void shut_down();

    const std::shared_ptr<Topology> topology_;
    const OwnEngine engine_;

    std::atomic<size_t> operations_{0};
    std::atomic<bool> closing_{false};

    std::mutex lock_;
    bool shut_down_ = false;
    const std::unique_ptr<CompletionNotifier> notifier_;  // null if no program asks for it

    // The place between the last batch that is alive and the first.
    Link batches_;
};

// What a batch is made with, so that nothing is allocated when requests are submitted. BatchDesc::storage.
struct BatchStorage : Link {
    BatchStorage(Transport::BatchDesc* batch, size_t capacity, bool is_watched);

    // How many requests are translated on the stack.
    static constexpr size_t kFew = 32;

    Transport::BatchDesc* const batch;
    // By a CompletionNotifier.
    const bool is_watched;
    // How many requests have been started, for who is not the thread that submits.
    std::atomic<size_t> started{0};
    std::vector<Transport::Slice> slices;
    // Of the requests that are not submitted yet.
    std::vector<std::vector<Transport::Slice*>> slice_lists;
    // Room to translate more than kFew requests.
    std::vector<te_transfer_request> requests;

    static BatchStorage& of(Transport::BatchDesc& batch) { return *static_cast<BatchStorage*>(batch.storage.get()); }
};

inline te_batch number(const Transport::BatchDesc& batch) { return reinterpret_cast<uintptr_t>(batch.context); }

// Starts requests, and takes them down in the batch.
Status submit(te_engine* engine, Transport::BatchDesc& batch, const std::vector<Transport::TransferRequest>& entries,
              const te_transfer_options* options);

// Tells what has become of a request, and takes it down in the batch.
Status task_status(te_engine* engine, Transport::BatchDesc& batch, size_t task, Transport::TransferStatus& status);

// Tells what has become of a batch. A batch that has failed is WAITING until all its requests are over, since the engine uses their memory.
Status batch_status(te_engine* engine, Transport::BatchDesc& batch, Transport::TransferStatus& status);

}  // namespace mooncake::transfer_engine_cxx
