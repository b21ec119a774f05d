// Wakes up programs that sleep until a batch is over, by its `completion_cv`.
//
// Programs that were compiled with USE_EVENT_DRIVEN_COMPLETION do that; the header tells the library so when such a program is loaded. Each
// engine that is initialised from then on watches all its batches, with an event descriptor for each and one thread, `te-completion`.
// Without such a program nothing of it is there. Locks: `lock_`, around the list of batches and while one is looked at; inside it the
// batch's `completion_mutex`.
#pragma once

#include <te.h>

#include <mutex>
#include <unordered_map>

#include "resources.h"
#include "transport/transport.h"

namespace mooncake::transfer_engine_cxx {

// Whether a program has asked for it, at any time so far.
bool completions_are_notified();

class CompletionNotifier {
   public:
    // Throws std::system_error if the system lacks descriptors or threads.
    explicit CompletionNotifier(te_engine* engine);
    CompletionNotifier(const CompletionNotifier&) = delete;

    // False if the system lacks descriptors.
    bool watch(Transport::BatchDesc& batch);
    // A batch that has been freed in the C interface. It is not touched any more.
    void forget(Transport::BatchDesc& batch);

   private:
    void run();

    te_engine* const engine_;
    Event stop_;
    const FileDescriptor epoll_;
    std::mutex lock_;
    std::unordered_map<te_batch, Transport::BatchDesc*> batches_;
    Thread thread_;  // uses all of these
};

}  // namespace mooncake::transfer_engine_cxx
