// Scattered transfers: each fragment is a request of one batch of the C interface, which the operation owns.
//
// A fragment that cannot be started ends at once. The engine outlives the operation, which holds the Core. Callbacks run on the thread
// that submits or waits, and may throw.

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "core.h"
#include "engine_state.h"
#include "results.h"

namespace mooncake {

using namespace transfer_engine_cxx;

class __attribute__((visibility("hidden"))) TransferEngine::ScatterTransferOperation::State {
   public:
    // Once the inner constructor has returned, the destructor cleans up after what throws here.
    State(std::shared_ptr<Core> core, const std::vector<ScatterTransferRange>& ranges) : State(std::move(core)) {
        size_t fragments = 0;
        for (const ScatterTransferRange& range : ranges) fragments += range.lengths.size();
        te_status created = te_batch_create(engine(), fragments, &batch_);
        Status refusal = failure(created);
        for (const ScatterTransferRange& range : ranges) start(range, refusal);
    }
    State(const State&) = delete;
    ~State() {
        wait(std::chrono::nanoseconds::max());
        if (!core_) return;
        te_batch_free(engine(), batch_);
        core_->operation_ends();
    }

    Status wait(std::chrono::nanoseconds timeout) {
        using Clock = std::chrono::steady_clock;
        const auto begin = Clock::now();
        for (;;) {
            collect();
            if (running_.empty()) return first_failure_;
            const std::chrono::nanoseconds waited = Clock::now() - begin;
            if (waited >= timeout) {
                return Status::Clock("timed out: " + std::to_string(running_.size()) + " fragments are still under way; wait again");
            }
            // Callbacks of what has ended are not kept waiting for what has not.
            auto pause = std::chrono::ceil<std::chrono::milliseconds>(std::min<std::chrono::nanoseconds>(timeout - waited, kPause));
            te_batch_wait(engine(), batch_, pause.count(), nullptr);
        }
    }

   private:
    explicit State(std::shared_ptr<Core> core) : core_(std::move(core)) {
        if (core_) core_->operation_begins();
    }

    static constexpr std::chrono::milliseconds kPause{1};

    // A fragment that was started. Its place in `started_` is the number of its request.
    struct Fragment {
        size_t range;
        size_t index;
    };

    te_engine* engine() const { return core_ ? core_->engine() : nullptr; }

    void start(const ScatterTransferRange& range, Status refusal) {
        callbacks_.push_back(range.on_fragment_complete);
        const size_t count = range.lengths.size(), range_number = callbacks_.size() - 1;
        te_segment segment = 0;
        if (refusal.ok()) refusal = check(range);
        if (refusal.ok()) refusal = open(range.remote_segment, segment);
        std::vector<te_transfer_request> requests;
        std::vector<Fragment> fragments;
        for (size_t i = 0; i < count; ++i) {
            Status status = refusal.ok() ? check_fragment(range, i) : refusal;
            if (!status.ok() || range.lengths[i] == 0) {
                end({range_number, i}, status);
                continue;
            }
            te_transfer_request& request = requests.emplace_back();
            request.opcode = static_cast<uint32_t>(range.opcode);
            request.local = static_cast<char*>(range.local_buffer) + range.local_offsets[i];
            request.segment = segment;
            request.remote_addr = range.remote_base_offset + range.remote_offsets[i];
            request.length = range.lengths[i];
            fragments.push_back({range_number, i});
        }
        if (requests.empty()) return;
        // Nothing may throw between the start of a request and the note of it.
        running_.reserve(running_.size() + fragments.size());
        started_.reserve(started_.size() + fragments.size());
        te_status started = te_batch_submit(engine(), batch_, requests.data(), sizeof requests[0], requests.size(), nullptr);
        if (started != 0) {
            Status status = failure(started);
            for (const Fragment& fragment : fragments) end(fragment, status);
            return;
        }
        for (const Fragment& fragment : fragments) {
            running_.push_back(started_.size());
            started_.push_back(fragment);
        }
    }

    static Status check(const ScatterTransferRange& range) {
        if (range.local_offsets.size() != range.lengths.size() || range.remote_offsets.size() != range.lengths.size()) {
            return Status::InvalidArgument("local_offsets, remote_offsets and lengths of a range differ in their number of elements");
        }
        if (!range.local_buffer) return Status::InvalidArgument("local_buffer of a range is null");
        if (range.remote_segment.empty()) return Status::InvalidArgument("remote_segment of a range is empty");
        return Status::OK();
    }

    static Status check_fragment(const ScatterTransferRange& range, size_t index) {
        auto within = [length = range.lengths[index]](size_t offset, size_t size) { return offset <= size && length <= size - offset; };
        if (!within(range.local_offsets[index], range.local_capacity)) {
            return Status::InvalidArgument("fragment " + std::to_string(index) + " runs past the end of its local buffer of " +
                                           std::to_string(range.local_capacity) + " bytes");
        }
        if (!within(range.remote_offsets[index], range.remote_size) || range.remote_base_offset > UINT64_MAX - range.remote_size) {
            return Status::InvalidArgument("fragment " + std::to_string(index) + " runs past the end of its range of " +
                                           std::to_string(range.remote_size) + " bytes in " + range.remote_segment);
        }
        return Status::OK();
    }

    Status open(const std::string& name, te_segment& segment) {
        auto known = segments_.find(name);
        if (known != segments_.end()) {
            segment = known->second;
            return Status::OK();
        }
        if (te_open_segment(engine(), name.c_str(), &segment) != 0) {
            return Status::InvalidArgument("segment " + name + " cannot be opened: " + te_last_error());
        }
        segments_.emplace(name, segment);
        return Status::OK();
    }

    // Tells of what has ended since the last time.
    void collect() {
        te_batch_status batch{};
        batch.struct_size = sizeof batch;
        if (running_.empty()) return;
        // An engine that the end of the process has shut down, or of the process that this one was forked from, answers no more.
        if (te_status told = te_batch_poll(engine(), batch_, &batch); told != 0) {
            const Status status = failure(told);
            for (size_t task : std::exchange(running_, {})) end(started_[task], status);
            return;
        }
        if (batch.finished == collected_) return;
        auto still_running = running_.begin();
        for (size_t task : running_) {
            te_transfer_result result{};
            result.struct_size = sizeof result;
            te_status told = te_batch_task_status(engine(), batch_, task, &result);
            if (told == 0 && (result.state == TE_STATE_WAITING || result.state == TE_STATE_PENDING)) {
                *still_running++ = task;
                continue;
            }
            ++collected_;
            end(started_[task], told == 0 ? status_of(task, result) : failure(told));
        }
        running_.erase(still_running, running_.end());
    }

    // Whatever ended a transfer is a Socket error here: Clock is about waiting.
    Status status_of(size_t task, const te_transfer_result& result) const {
        if (result.state == TE_STATE_COMPLETED) return Status::OK();
        char text[1024] = "";
        te_batch_task_error(engine(), batch_, task, text, sizeof text);
        return Status::Socket(text);
    }

    void end(const Fragment& fragment, const Status& status) {
        Status seen = status;
        try {
            if (callbacks_[fragment.range]) callbacks_[fragment.range](fragment.index, status);
        } catch (const std::exception& error) {
            if (seen.ok()) seen = Status::Context(std::string("on_fragment_complete has thrown: ") + error.what());
        } catch (...) {
            if (seen.ok()) seen = Status::Context("on_fragment_complete has thrown");
        }
        if (first_failure_.ok()) first_failure_ = std::move(seen);
    }

    const std::shared_ptr<Core> core_;  // null if the engine was not started
    te_batch batch_ = 0;
    std::unordered_map<std::string, te_segment> segments_;
    std::vector<std::function<void(size_t, const Status&)>> callbacks_;
    std::vector<Fragment> started_;
    // Numbers of requests, in order.
    std::vector<size_t> running_;
    uint64_t collected_ = 0;
    Status first_failure_;
};

TransferEngine::ScatterTransferOperation::ScatterTransferOperation(std::unique_ptr<State> state) : state_(std::move(state)) {}
TransferEngine::ScatterTransferOperation::ScatterTransferOperation(ScatterTransferOperation&&) noexcept = default;
TransferEngine::ScatterTransferOperation& TransferEngine::ScatterTransferOperation::operator=(ScatterTransferOperation&&) noexcept =
    default;
TransferEngine::ScatterTransferOperation::~ScatterTransferOperation() = default;

Status TransferEngine::ScatterTransferOperation::wait() { return waitFor(std::chrono::nanoseconds::max()); }

Status TransferEngine::ScatterTransferOperation::waitFor(std::chrono::nanoseconds timeout) {
    return state_ ? state_->wait(timeout) : Status::InvalidArgument("the operation has been moved away");
}

TransferEngine::ScatterTransferOperation TransferEngine::submitScatter(const std::vector<ScatterTransferRange>& ranges) {
    return ScatterTransferOperation(std::make_unique<ScatterTransferOperation::State>(state_->core, ranges));
}

Status TransferEngine::transferScatter(const std::vector<ScatterTransferRange>& ranges) { return submitScatter(ranges).wait(); }

}  // namespace mooncake
