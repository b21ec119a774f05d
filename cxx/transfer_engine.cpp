// The members of the class: each is a call or two of te.h, or of transfer_engine_c.h where that tells errors and states as upstream does.
// They are exported, not inline, and none calls submitTransfer() or getTransferStatus() of the class: programs replace these.
// What an engine is kept in is engine_state.h and core.h.
#include "transfer_engine.h"

#include <transfer_engine_c.h>

#include <array>
#include <cstddef>
#include <system_error>

#include "engine_metadata.h"
#include "engine_state.h"
#include "results.h"

namespace mooncake {

using namespace transfer_engine_cxx;

namespace {

// Null and all ones, which an allocation that failed gives, are no batches; other numbers are not checked, as anywhere that an address
// is taken.
bool may_be_batch(BatchID batch_id) { return batch_id != 0 && batch_id != INVALID_BATCH_ID; }

Status no_batch() { return Status::InvalidArgument("that is no batch: allocateBatchID gave INVALID_BATCH_ID, or was not called"); }

}  // namespace

TransferEngine::State::~State() {
    set_alias(nullptr);
    if (core) core->close();
}

bool TransferEngine::State::has_transport(const char* protocol) const {
    int installed = 0;
    return engine && te_has_transport(engine, protocol, &installed) == 0 && installed != 0;
}

void TransferEngine::State::set_alias(const void* address) {
    if (engine) {
        te_engine_set_alias(engine, address);
    } else {
        te_topology_set_alias(topology->handle(), address);
    }
}

TransferEngine::TransferEngine(bool auto_discover) : TransferEngine(auto_discover, {}) {}

TransferEngine::TransferEngine(bool auto_discover, const std::vector<std::string>& filter) : state_(std::make_unique<State>()) {
    state_->auto_discover.enabled = auto_discover;
    state_->filters = filter;
    state_->set_alias(this);
}

TransferEngine::TransferEngine(TransferEngine&& other) noexcept : state_(std::move(other.state_)) {
    if (state_) state_->set_alias(this);
}

TransferEngine& TransferEngine::operator=(TransferEngine&& other) noexcept {
    state_ = std::move(other.state_);
    if (state_) state_->set_alias(this);
    return *this;
}

TransferEngine::~TransferEngine() = default;

int TransferEngine::init(const std::string& metadata_conn_string, const std::string& local_server_name, const std::string&, uint64_t) {
    if (state_->engine) return ERR_INVALID_ARGUMENT;
    std::vector<const char*> nics;
    for (const std::string& nic : state_->filters) nics.push_back(nic.c_str());
    te_engine_options options{};
    options.struct_size = sizeof options;
    options.metadata = metadata_conn_string.c_str();
    options.server_name = local_server_name.c_str();
    options.transport = !state_->auto_discover.enabled ? "" : state_->auto_discover.protocol == "efa" ? "efa" : "auto";
    options.nics = nics.data();
    options.nic_count = nics.size();
    options.topology_handle = state_->topology->handle();
    te_engine* engine;
    te_status created = te_engine_create(&options, &engine);
    if (created != 0) return created;

    try {
        auto core = std::make_shared<Core>(OwnEngine(engine), state_->topology);
        state_->metadata = engine_metadata(engine);
        state_->core = std::move(core);
    } catch (const std::system_error&) {
        return TE_ERR_LIMIT;
    }
    state_->engine = engine;
    state_->set_alias(this);
    if (state_->graceful_shutdown) ::enableGracefulShutdown(engine);
    return 0;
}

int TransferEngine::freeEngine() {
    if (state_->core) state_->core->close();
    return 0;
}

Transport* TransferEngine::installTransport(const std::string& proto, void** args) {
    if (!state_->has_transport(proto.c_str())) {
        const char* matrix = args ? static_cast<const char*>(args[0]) : nullptr;
        if (te_install_transport(state_->engine, proto.c_str(), matrix) != 0) return nullptr;
    }
    return getTransport(proto);
}

int TransferEngine::uninstallTransport(const std::string&) { return ERR_NOT_IMPLEMENTED; }

Transport* TransferEngine::getTransport(const std::string& proto) {
    if (!state_->has_transport(proto.c_str())) return nullptr;
    std::lock_guard guard(state_->transports_lock);
    return &state_->transports[proto];
}

std::string TransferEngine::getLocalIpAndPort() {
    if (!state_->engine) return "";
    std::array<char, 512> address;
    return te_engine_address(state_->engine, address.data(), address.size()) == 0 ? address.data() : "";
}

int TransferEngine::getRpcPort() {
    std::string address = getLocalIpAndPort();
    return parseFromString<uint16_t>(std::string_view(address).substr(address.rfind(':') + 1)).value_or(0);
}

bool TransferEngine::isUsingTent() const { return false; }

SegmentHandle TransferEngine::openSegment(const std::string& segment_name) {
    te_segment segment;
    return te_open_segment(state_->engine, segment_name.c_str(), &segment) == 0 ? segment : static_cast<SegmentHandle>(-1);
}

// The engine finds a segment again by itself when its peer has changed: there is nothing that a program had to do about it.
Status TransferEngine::CheckSegmentStatus(SegmentID) { return Status::OK(); }

// The function of transfer_engine_c.h, since a segment that has been removed is closed as well as any, as upstream has it.
int TransferEngine::closeSegment(SegmentHandle segment_id) {
    return ::closeSegment(state_->engine, static_cast<segment_id_t>(segment_id));
}

int TransferEngine::removeLocalSegment(const std::string& segment_name) {
    return state_->metadata ? state_->metadata->removeSegmentDesc(segment_name) : ERR_INVALID_ARGUMENT;
}

int TransferEngine::syncSegmentCache(const std::string& segment_name) {
    return state_->metadata ? state_->metadata->syncSegmentCache(segment_name) : ERR_INVALID_ARGUMENT;
}

int TransferEngine::registerLocalMemory(void* addr, size_t length, const std::string& location, bool remote_accessible,
                                        bool update_metadata) {
    te_memory_options options{};
    options.struct_size = sizeof options;
    options.location = location.c_str();
    options.access = remote_accessible ? TE_ACCESS_REMOTE : TE_ACCESS_LOCAL;
    options.publish = update_metadata ? TE_PUBLISH_NOW : TE_PUBLISH_LATER;
    return te_register_local_memory(state_->engine, addr, length, &options);
}

int TransferEngine::unregisterLocalMemory(void* addr, bool update_metadata) {
    te_status status = te_unregister_local_memory(state_->engine, addr);
    // The engine tells the server in any case. Who has not asked for that is not told either that the server did not listen.
    return status == TE_ERR_METADATA && !update_metadata ? 0 : status;
}

int TransferEngine::registerLocalMemoryBatch(const std::vector<BufferEntry>& buffer_list, const std::string& location) {
    static_assert(sizeof(te_buffer) == sizeof(BufferEntry) && offsetof(te_buffer, length) == offsetof(BufferEntry, length));
    te_memory_options options{};
    options.struct_size = sizeof options;
    options.location = location.c_str();
    return te_register_local_memory_batch(state_->engine, reinterpret_cast<const te_buffer*>(buffer_list.data()), sizeof(te_buffer),
                                          buffer_list.size(), &options);
}

int TransferEngine::unregisterLocalMemoryBatch(const std::vector<void*>& addr_list) {
    return te_unregister_local_memory_batch(state_->engine, addr_list.data(), addr_list.size());
}

bool TransferEngine::checkOverlap(void* addr, uint64_t length) {
    te_memory_region region{};
    region.struct_size = sizeof region;
    return te_find_overlap(state_->engine, addr, length, &region) == 0;
}

BatchID TransferEngine::allocateBatchID(size_t batch_size) {
    Transport::BatchDesc* batch = state_->core ? state_->core->allocate(batch_size) : nullptr;
    return batch ? batch->id : INVALID_BATCH_ID;
}

Status TransferEngine::freeBatchID(BatchID batch_id) {
    if (!may_be_batch(batch_id) || !state_->core) return no_batch();
    return state_->core->free(&Transport::toBatchDesc(batch_id));
}

Status TransferEngine::submitTransfer(BatchID batch_id, const std::vector<TransferRequest>& entries) {
    if (!may_be_batch(batch_id)) return no_batch();
    return submit(state_->engine, Transport::toBatchDesc(batch_id), entries, nullptr);
}

Status TransferEngine::submitTransferWithNotify(BatchID batch_id, const std::vector<TransferRequest>& entries,
                                                TransferMetadata::NotifyDesc notify_msg) {
    if (!may_be_batch(batch_id)) return no_batch();
    if (entries.empty()) return Status::InvalidArgument("a notification goes to the segment of the first request, and there is none");
    te_transfer_options options{};
    options.struct_size = sizeof options;
    options.notify_name = notify_msg.name.c_str();
    options.notify_message = notify_msg.notify_msg.c_str();
    return submit(state_->engine, Transport::toBatchDesc(batch_id), entries, &options);
}

Status TransferEngine::getTransferStatus(BatchID batch_id, size_t task_id, TransferStatus& status) {
    if (!may_be_batch(batch_id)) return no_batch();
    return task_status(state_->engine, Transport::toBatchDesc(batch_id), task_id, status);
}

Status TransferEngine::getBatchTransferStatus(BatchID batch_id, TransferStatus& status) {
    if (!may_be_batch(batch_id)) return no_batch();
    return batch_status(state_->engine, Transport::toBatchDesc(batch_id), status);
}

int TransferEngine::getNotifies(std::vector<TransferMetadata::NotifyDesc>& notifies) {
    return state_->metadata ? state_->metadata->getNotifies(notifies) : ERR_INVALID_ARGUMENT;
}

// The function of transfer_engine_c.h, since it tells unknown segments as upstream does.
int TransferEngine::sendNotifyByID(SegmentID target_id, TransferMetadata::NotifyDesc notify_msg) {
    return ::genNotifyInEngine(state_->engine, target_id, {notify_msg.name.data(), notify_msg.notify_msg.data()});
}

int TransferEngine::sendNotifyByName(std::string remote_agent, TransferMetadata::NotifyDesc notify_msg) {
    return te_notify_name(state_->engine, remote_agent.c_str(), notify_msg.name.c_str(), notify_msg.notify_msg.c_str());
}

PeerLiveness TransferEngine::probePeerAliveByID(SegmentID target_id) {
    return te_probe_segment(state_->engine, target_id) == 0 ? PeerLiveness::Alive : PeerLiveness::Unreachable;
}

Status TransferEngine::getNicLoadStats(std::vector<NicLoadStats>& stats) const {
    stats.clear();
    std::vector<te_nic_load> loads;
    size_t count = 0;
    do {
        loads.resize(count);
        te_status told = te_nic_loads(state_->engine, loads.data(), sizeof(te_nic_load), loads.size(), &count);
        if (told != 0) return failure(told);
    } while (count > loads.size());
    for (size_t i = 0; i < count; ++i) stats.push_back({loads[i].name, loads[i].bytes_in_flight, loads[i].bytes_per_second});
    return Status::OK();
}

bool TransferEngine::isTcpOnly() const { return state_->has_transport("tcp") && !state_->has_transport("rdma"); }

std::shared_ptr<TransferMetadata> TransferEngine::getMetadata() { return state_->metadata; }

std::shared_ptr<Topology> TransferEngine::getLocalTopology() { return state_->topology; }

std::string TransferEngine::getLocalTopologyString() { return state_->topology->toString(); }

void TransferEngine::setAutoDiscover(bool auto_discover) { state_->auto_discover.enabled = auto_discover; }

void TransferEngine::setAutoDiscover(const AutoDiscoverConfig& config) { state_->auto_discover = config; }

void TransferEngine::setWhitelistFilters(std::vector<std::string>&& filters) { state_->filters = std::move(filters); }

void* TransferEngine::getBaseAddr() { return nullptr; }

int TransferEngine::numContexts() const { return static_cast<int>(state_->topology->getHcaList().size()); }

std::string TransferEngine::showLinks(bool json) const {
    char* text = nullptr;
    te_status told = state_->engine ? te_engine_links(state_->engine, json, &text)
                                    : te_topology_links(state_->topology->handle(), json, &text);
    return take_text(told, text);
}

void TransferEngine::enableGracefulShutdown() {
    state_->graceful_shutdown = true;
    if (state_->engine) ::enableGracefulShutdown(state_->engine);
}

}  // namespace mooncake
