// A library to be preloaded, as upstream's fault injection for the collective library: it defines two members of the class itself, and
// calls the originals by their mangled names. Every third submission is refused, and every status that is asked for is counted.
#include <dlfcn.h>
#include <transfer_engine.h>

#include <atomic>
#include <cstdlib>

static std::atomic<int> submissions{0}, statuses{0};

extern "C" __attribute__((visibility("default"))) int preloaded_submissions() { return submissions; }
extern "C" __attribute__((visibility("default"))) int preloaded_statuses() { return statuses; }

template <class Function>
static Function find_original(const char* mangled) {
    void* symbol = dlsym(RTLD_NEXT, mangled);
    if (symbol == nullptr) std::abort();
    return reinterpret_cast<Function>(symbol);
}

namespace mooncake {

Status TransferEngine::submitTransfer(BatchID batch_id, const std::vector<TransferRequest>& entries) {
    using Original = Status (*)(TransferEngine*, BatchID, const std::vector<TransferRequest>&);
    static const auto original = find_original<Original>(
        "_ZN8mooncake14TransferEngine14submitTransferEmRKSt6vectorINS_9Transport15TransferRequestESaIS3_EE");
    if (++submissions % 3 == 0) return Status::InvalidArgument("refused by the preloaded library");
    return original(this, batch_id, entries);
}

Status TransferEngine::getTransferStatus(BatchID batch_id, size_t task_id, TransferStatus& status) {
    using Original = Status (*)(TransferEngine*, BatchID, size_t, TransferStatus&);
    static const auto original =
        find_original<Original>("_ZN8mooncake14TransferEngine17getTransferStatusEmmRNS_9Transport14TransferStatusE");
    ++statuses;
    return original(this, batch_id, task_id, status);
}

}  // namespace mooncake
