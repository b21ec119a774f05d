#include "core.h"

#include <transfer_engine_c.h>

#include <array>
#include <new>
#include <stdexcept>

#include "results.h"

namespace mooncake::transfer_engine_cxx {

using BatchDesc = Transport::BatchDesc;
using Slice = Transport::Slice;
using TransferStatus = Transport::TransferStatus;
using TransferTask = Transport::TransferTask;

static_assert(sizeof(void*) == sizeof(te_batch), "BatchDesc::context holds the number of a batch");

BatchStorage::BatchStorage(BatchDesc* batch, size_t capacity, bool is_watched)
    : batch(batch), is_watched(is_watched), slices(capacity), slice_lists(capacity) {
    for (size_t i = 0; i < capacity; ++i) slice_lists[i].assign(1, &slices[i]);
    if (capacity > kFew) requests.resize(capacity);
}

Core::Core(OwnEngine engine, std::shared_ptr<Topology> topology)
    : topology_(std::move(topology)),
      engine_(std::move(engine)),
      notifier_(completions_are_notified() ? std::make_unique<CompletionNotifier>(this->engine()) : nullptr) {}

Core::~Core() { shut_down(); }

BatchDesc* Core::allocate(size_t capacity) {
    te_batch batch_number;
    if (te_batch_create(engine(), capacity, &batch_number) != 0) return nullptr;
    std::unique_ptr<BatchDesc> batch;
    try {
        batch = std::make_unique<BatchDesc>();
        auto storage = std::make_shared<BatchStorage>(batch.get(), capacity, notifier_ != nullptr);
        batch->task_list.reserve(capacity);
        batch->id = reinterpret_cast<Transport::BatchID>(batch.get());
        batch->batch_size = capacity;
        batch->context = reinterpret_cast<void*>(batch_number);
        batch->storage = storage;
        if (notifier_ && !notifier_->watch(*batch)) throw std::bad_alloc();
        std::lock_guard guard(lock_);
        if (!shut_down_) storage->insert_before(&batches_);
    } catch (const std::exception&) {  // bad_alloc, or length_error for a capacity beyond all bounds
        te_batch_free(engine(), batch_number);
        return nullptr;
    }
    return batch.release();
}

Status Core::free(BatchDesc* batch) {
    te_status freed = te_batch_free(engine(), number(*batch));
    {
        std::lock_guard guard(lock_);
        // After the end of the engine all its batches are over, whatever the C interface says of them.
        if (freed != 0 && !shut_down_) return failure(freed);
        BatchStorage::of(*batch).remove();
    }
    if (notifier_) notifier_->forget(*batch);
    delete batch;
    return Status::OK();
}

void Core::operation_ends() {
    if (operations_.fetch_sub(1) == 1 && closing_) shut_down();
}

void Core::close() {
    closing_ = true;
    if (operations_ == 0) shut_down();
}

// The handle goes on telling how requests have ended until it is destroyed.
void Core::shut_down() {
    std::lock_guard guard(lock_);
    if (shut_down_) return;
    shut_down_ = true;
    te_shut_down(engine());
    while (batches_.next != &batches_) {
        BatchStorage& storage = *static_cast<BatchStorage*>(batches_.next);
        storage.remove();
        const size_t started = storage.started.load(std::memory_order_acquire);
        for (size_t i = 0; i < started; ++i) {
            TransferStatus status;
            task_status(engine(), *storage.batch, i, status);
        }
    }
}

static te_status start(te_engine* engine, BatchDesc& batch, const te_transfer_request* requests, size_t count,
                       const te_transfer_options* options) {
    // Of a batch that is watched, nobody may see that earlier requests are over once these are under way.
    std::unique_lock<std::mutex> completion;
    bool was_finished = false;
    if (BatchStorage::of(batch).is_watched) {
        completion = std::unique_lock(batch.completion_mutex);
        was_finished = batch.is_finished.exchange(false);
    }
    te_status started = te_batch_submit(engine, number(batch), requests, sizeof *requests, count, options);
    if (started != 0 && was_finished) batch.is_finished = true;
    return started;
}

Status submit(te_engine* engine, BatchDesc& batch, const std::vector<Transport::TransferRequest>& entries,
              const te_transfer_options* options) {
    const size_t count = entries.size(), first = batch.task_list.size();
    if (count > batch.batch_size - first) {
        return Status::TooManyRequests("the batch has room for " + std::to_string(batch.batch_size) + " requests and holds " +
                                       std::to_string(first) + ", so " + std::to_string(count) +
                                       " more do not fit; allocate a larger batch");
    }
    BatchStorage& storage = BatchStorage::of(batch);
    std::array<te_transfer_request, BatchStorage::kFew> few;
    te_transfer_request* requests = count <= few.size() ? few.data() : storage.requests.data();
    for (size_t i = 0; i < count; ++i) {
        const Transport::TransferRequest& entry = entries[i];
        requests[i] = te_transfer_request{};
        requests[i].opcode = static_cast<uint32_t>(entry.opcode);
        requests[i].local = entry.source;
        requests[i].segment = entry.target_id;
        requests[i].remote_addr = entry.target_offset;
        requests[i].length = entry.length;
        requests[i].retry_hint = entry.advise_retry_cnt > 0 ? static_cast<uint32_t>(entry.advise_retry_cnt) : 0;
        requests[i].transport_hint = static_cast<uint32_t>(entry.transport_hint);
        requests[i].group = entry.task_group_id;

        Slice& slice = storage.slices[first + i];
        slice.length = entry.length;
        slice.status = Slice::POSTED;
        TransferTask& task = batch.task_list.emplace_back();
        task.slice_count = 1;
        task.total_bytes = entry.length;
        task.batch_id = batch.id;
        task.slice_list = std::move(storage.slice_lists[first + i]);
    }
    te_status started = start(engine, batch, requests, count, options);
    if (started == 0) {
        storage.started.store(first + count, std::memory_order_release);
        return Status::OK();
    }
    Status status = failure(started);
    for (size_t i = count; i-- > 0;) {
        storage.slice_lists[first + i] = std::move(batch.task_list.back().slice_list);
        batch.task_list.pop_back();
    }
    return status;
}

// Threads that ask at the same time write the same.
static void take_down(TransferTask& task, const TransferStatus& status) {
    if (__atomic_load_n(&task.is_finished, __ATOMIC_ACQUIRE)) return;
    Slice::SliceStatus slice;
    switch (status.s) {
        case Transport::COMPLETED: slice = Slice::SUCCESS; break;
        case Transport::TIMEOUT: slice = Slice::TIMEOUT; break;
        case Transport::FAILED: slice = Slice::FAILED; break;
        default: return;
    }
    volatile uint64_t& count = slice == Slice::SUCCESS ? task.success_slice_count : task.failed_slice_count;
    std::atomic_ref(task.slice_list.front()->status).store(slice, std::memory_order_relaxed);
    __atomic_store_n(&task.transferred_bytes, status.transferred_bytes, __ATOMIC_RELAXED);
    __atomic_store_n(&count, uint64_t{1}, __ATOMIC_RELAXED);
    __atomic_store_n(&task.is_finished, true, __ATOMIC_RELEASE);
}

// The function of transfer_engine_c.h, since it shows the states that programs of upstream know.
Status task_status(te_engine* engine, BatchDesc& batch, size_t task, TransferStatus& status) {
    transfer_status result;
    int code = ::getTransferStatus(engine, number(batch), task, &result);
    if (code != 0) return from_positive(code);
    status.s = static_cast<Transport::TransferStatusEnum>(result.status);
    status.transferred_bytes = result.transferred_bytes;
    take_down(batch.task_list[task], status);
    return Status::OK();
}

Status batch_status(te_engine* engine, BatchDesc& batch, TransferStatus& status) {
    te_batch_status result{};
    result.struct_size = sizeof result;
    te_status told = te_batch_poll(engine, number(batch), &result);
    if (told != 0) return failure(told);
    status.transferred_bytes = result.bytes;
    if (result.finished < result.tasks) {
        status.s = Transport::WAITING;
        return Status::OK();
    }
    status.s = result.failed == 0 ? Transport::COMPLETED : Transport::FAILED;
    batch.finished_transfer_bytes.store(result.bytes, std::memory_order_relaxed);
    batch.finished_task_count.store(result.finished, std::memory_order_relaxed);
    batch.has_failure.store(result.failed != 0, std::memory_order_relaxed);
    batch.is_finished.store(true, std::memory_order_release);
    return Status::OK();
}

}  // namespace mooncake::transfer_engine_cxx
