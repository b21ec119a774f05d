#include "completion.h"

#include <pthread.h>
#include <sys/epoll.h>

#include <array>
#include <atomic>

#include "core.h"

namespace mooncake::transfer_engine_cxx {

namespace {

std::atomic<bool> notified{false};

// The number of no batch: stands for `stop_`.
constexpr te_batch kStop = UINT64_MAX;

// Each completion is an edge. The descriptor of a batch is therefore never read, which could not be done safely: it may be closed, and its
// number be another's, at any time.
bool add(const FileDescriptor& epoll, int fd, te_batch batch) {
    epoll_event event{};
    event.events = EPOLLIN | EPOLLET;
    event.data.u64 = batch;
    return epoll_ctl(epoll.number(), EPOLL_CTL_ADD, fd, &event) == 0;
}

FileDescriptor epoll_with(const Event& stop) {
    FileDescriptor epoll = FileDescriptor::made(epoll_create1(EPOLL_CLOEXEC));
    if (!add(epoll, stop.number(), kStop)) throw std::system_error(errno, std::generic_category());
    return epoll;
}

}  // namespace

bool completions_are_notified() { return notified.load(std::memory_order_relaxed); }

bool notify_completions() {
    notified = true;
    return true;
}

CompletionNotifier::CompletionNotifier(te_engine* engine)
    : engine_(engine), epoll_(epoll_with(stop_)), thread_([this] { run(); }, [this] { stop_.signal(); }) {}

bool CompletionNotifier::watch(Transport::BatchDesc& batch) {
    int fd;
    if (te_batch_event_fd(engine_, number(batch), &fd) != 0) return false;
    std::lock_guard guard(lock_);
    if (!add(epoll_, fd, number(batch))) return false;
    batches_[number(batch)] = &batch;
    return true;
}

void CompletionNotifier::forget(Transport::BatchDesc& batch) {
    std::lock_guard guard(lock_);
    batches_.erase(number(batch));
}

void CompletionNotifier::run() {
    pthread_setname_np(pthread_self(), "te-completion");
    std::array<epoll_event, 64> events;
    for (;;) {
        int count = epoll_wait(epoll_.number(), events.data(), events.size(), -1);
        for (int i = 0; i < count; ++i) {
            if (events[i].data.u64 == kStop) return;
            std::lock_guard guard(lock_);
            auto known = batches_.find(events[i].data.u64);
            if (known == batches_.end()) continue;
            Transport::BatchDesc& batch = *known->second;
            std::lock_guard completion(batch.completion_mutex);
            Transport::TransferStatus status;
            if (!batch_status(engine_, batch, status).ok() || status.s == Transport::WAITING) continue;
            batch.completion_cv.notify_all();
        }
    }
}

}  // namespace mooncake::transfer_engine_cxx
