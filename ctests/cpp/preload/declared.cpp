// Upstream's declarations, as bare as can be, for their mangled names: check_names.py compares them with what the library exports. Nothing
// of this is ever called. It includes none of our headers.
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace mooncake {

class Status {
public:
    ~Status() {}
};

struct TopologyEntry {};
using TopologyMatrix = std::unordered_map<std::string, TopologyEntry>;

class Topology {
public:
    bool empty() const;
    void clear();
    int discover(const std::vector<std::string>&);
    int parse(const std::string&);
    int disableDevice(const std::string&);
    std::string toString() const;
    TopologyMatrix getMatrix() const;
    const std::vector<std::string>& getHcaList() const;
    int selectDevice(const std::string, int);
    int selectDevice(const std::string, std::string_view, int);
    int selectDeviceByLocalHca(const std::string, std::string_view, int);
};

struct TransferMetadata {
    using SegmentID = uint64_t;
    struct NotifyDesc {
        std::string name, notify_msg;
    };
    struct BufferDesc {};
    struct SegmentDesc {};
    struct RpcMetaDesc {};
    struct HandShakeDesc {};
    using OnReceiveHandShake = std::function<int(const HandShakeDesc&, HandShakeDesc&)>;

    TransferMetadata(const std::string&);
    ~TransferMetadata();
    std::shared_ptr<SegmentDesc> getSegmentDescByName(const std::string&, bool);
    std::shared_ptr<SegmentDesc> getSegmentDescByID(SegmentID, bool);
    std::shared_ptr<SegmentDesc> getSegmentDesc(const std::string&);
    SegmentID getSegmentID(const std::string&);
    int updateLocalSegmentDesc(SegmentID);
    int rePublishRpcMetaEntry(const std::string&);
    int removeSegmentDesc(const std::string&);
    int sendProbe(const std::string&);
    int addLocalSegment(SegmentID, const std::string&, std::shared_ptr<SegmentDesc>&&);
    int removeLocalSegment(const std::string&);
    int addLocalMemoryBuffer(const BufferDesc&, bool);
    int removeLocalMemoryBuffer(void*, bool);
    int addRpcMetaEntry(const std::string&, RpcMetaDesc&);
    int removeRpcMetaEntry(const std::string&);
    int getRpcMetaEntry(const std::string&, RpcMetaDesc&);
    int startHandshakeDaemon(OnReceiveHandShake, uint16_t, int);
    int sendHandshake(const std::string&, const HandShakeDesc&, HandShakeDesc&);
};

struct MetadataStoragePlugin {
    static std::shared_ptr<MetadataStoragePlugin> Create(const std::string&);
};
uint16_t findAvailableTcpPort(int&, bool);

struct MemoryLocationEntry {};
const std::vector<MemoryLocationEntry> getMemoryLocation(void*, size_t, bool);

struct GlobalConfig {};
void loadGlobalConfig(GlobalConfig&);
GlobalConfig& globalConfig();

struct SharedSegmentOptions {};
struct SharedSegment {
    static Status Create(const std::string&, uint64_t, const SharedSegmentOptions&, std::shared_ptr<SharedSegment>&, std::string&);
    static bool Supported(bool, bool);
    Status Complete(const std::vector<std::string>&);
    bool ready() const;
    uintptr_t base_addr() const;
    uint64_t size() const;
    uintptr_t device_addr() const;
};

class Transport {
public:
    using SegmentID = uint64_t;
    using SegmentHandle = SegmentID;
    using BatchID = uint64_t;
    struct TransferRequest {
        enum OpCode { READ, WRITE };
    };
    struct TransferStatus {};
    struct BufferEntry {};
    struct NicLoadStats {};
};

enum class PeerLiveness : uint8_t { Alive = 0, Unreachable = 1 };
struct AutoDiscoverConfig {};

class TransferEngine {
public:
    struct ScatterTransferRange {};
    class ScatterTransferOperation {
    public:
        ScatterTransferOperation(ScatterTransferOperation&&) noexcept;
        ScatterTransferOperation& operator=(ScatterTransferOperation&&) noexcept;
        ~ScatterTransferOperation();
        Status wait();
        Status waitFor(std::chrono::nanoseconds);
    };
    using SegmentID = Transport::SegmentID;
    using SegmentHandle = Transport::SegmentHandle;
    using BatchID = Transport::BatchID;
    using Requests = std::vector<Transport::TransferRequest>;

    TransferEngine(bool);
    TransferEngine(bool, const std::vector<std::string>&);
    TransferEngine(TransferEngine&&) noexcept;
    TransferEngine& operator=(TransferEngine&&) noexcept;
    ~TransferEngine();
    int init(const std::string&, const std::string&, const std::string&, uint64_t);
    int freeEngine();
    Transport* installTransport(const std::string&, void**);
    int uninstallTransport(const std::string&);
    Transport* getTransport(const std::string&);
    std::string getLocalIpAndPort();
    int getRpcPort();
    SegmentHandle openSegment(const std::string&);
    Status CheckSegmentStatus(SegmentID);
    int closeSegment(SegmentHandle);
    int removeLocalSegment(const std::string&);
    int syncSegmentCache(const std::string&);
    int registerLocalMemory(void*, size_t, const std::string&, bool, bool);
    int unregisterLocalMemory(void*, bool);
    int registerLocalMemoryBatch(const std::vector<Transport::BufferEntry>&, const std::string&);
    int unregisterLocalMemoryBatch(const std::vector<void*>&);
    bool checkOverlap(void*, uint64_t);
    BatchID allocateBatchID(size_t);
    Status freeBatchID(BatchID);
    Status submitTransfer(BatchID, const Requests&);
    Status submitTransferWithNotify(BatchID, const Requests&, TransferMetadata::NotifyDesc);
    Status getTransferStatus(BatchID, size_t, Transport::TransferStatus&);
    Status getBatchTransferStatus(BatchID, Transport::TransferStatus&);
    int getNotifies(std::vector<TransferMetadata::NotifyDesc>&);
    int sendNotifyByID(SegmentID, TransferMetadata::NotifyDesc);
    int sendNotifyByName(std::string, TransferMetadata::NotifyDesc);
    PeerLiveness probePeerAliveByID(SegmentID);
    ScatterTransferOperation submitScatter(const std::vector<ScatterTransferRange>&);
    Status transferScatter(const std::vector<ScatterTransferRange>&);
    Status getNicLoadStats(std::vector<Transport::NicLoadStats>&) const;
    bool isTcpOnly() const;
    std::shared_ptr<TransferMetadata> getMetadata();
    std::shared_ptr<Topology> getLocalTopology();
    std::string getLocalTopologyString();
    void setAutoDiscover(bool);
    void setAutoDiscover(const AutoDiscoverConfig&);
    void setWhitelistFilters(std::vector<std::string>&&);
    void* getBaseAddr();
    int numContexts() const;
    std::string showLinks(bool) const;
    void enableGracefulShutdown();
};

// Taking the address of a function makes it an undefined symbol of this object. Constructors and destructors have to be used.
template <class... Function>
__attribute__((used)) void use(Function... functions);

void name_functions() {
    use(&Topology::empty, &Topology::clear, &Topology::discover, &Topology::parse, &Topology::disableDevice, &Topology::toString,
        &Topology::getMatrix, &Topology::getHcaList);
    use(static_cast<int (Topology::*)(const std::string, int)>(&Topology::selectDevice),
        static_cast<int (Topology::*)(const std::string, std::string_view, int)>(&Topology::selectDevice), &Topology::selectDeviceByLocalHca);
    use(&TransferMetadata::getSegmentDescByName, &TransferMetadata::getSegmentDescByID, &TransferMetadata::getSegmentDesc,
        &TransferMetadata::getSegmentID, &TransferMetadata::updateLocalSegmentDesc, &TransferMetadata::rePublishRpcMetaEntry,
        &TransferMetadata::removeSegmentDesc, &TransferMetadata::sendProbe, &TransferMetadata::addLocalSegment,
        &TransferMetadata::removeLocalSegment, &TransferMetadata::addLocalMemoryBuffer, &TransferMetadata::removeLocalMemoryBuffer,
        &TransferMetadata::addRpcMetaEntry, &TransferMetadata::removeRpcMetaEntry, &TransferMetadata::getRpcMetaEntry,
        &TransferMetadata::startHandshakeDaemon, &TransferMetadata::sendHandshake);
    use(&MetadataStoragePlugin::Create, &findAvailableTcpPort, &getMemoryLocation, &loadGlobalConfig, &globalConfig);
    use(&SharedSegment::Create, &SharedSegment::Supported, &SharedSegment::Complete, &SharedSegment::ready, &SharedSegment::base_addr,
        &SharedSegment::size, &SharedSegment::device_addr);
    use(&TransferEngine::init, &TransferEngine::freeEngine, &TransferEngine::installTransport, &TransferEngine::uninstallTransport,
        &TransferEngine::getTransport, &TransferEngine::getLocalIpAndPort, &TransferEngine::getRpcPort, &TransferEngine::openSegment,
        &TransferEngine::CheckSegmentStatus, &TransferEngine::closeSegment, &TransferEngine::removeLocalSegment,
        &TransferEngine::syncSegmentCache, &TransferEngine::registerLocalMemory, &TransferEngine::unregisterLocalMemory,
        &TransferEngine::registerLocalMemoryBatch, &TransferEngine::unregisterLocalMemoryBatch, &TransferEngine::checkOverlap,
        &TransferEngine::allocateBatchID, &TransferEngine::freeBatchID, &TransferEngine::submitTransfer,
        &TransferEngine::submitTransferWithNotify, &TransferEngine::getTransferStatus, &TransferEngine::getBatchTransferStatus,
        &TransferEngine::getNotifies, &TransferEngine::sendNotifyByID, &TransferEngine::sendNotifyByName,
        &TransferEngine::probePeerAliveByID, &TransferEngine::submitScatter, &TransferEngine::transferScatter,
        &TransferEngine::getNicLoadStats, &TransferEngine::isTcpOnly, &TransferEngine::getMetadata, &TransferEngine::getLocalTopology,
        &TransferEngine::getLocalTopologyString, &TransferEngine::setWhitelistFilters, &TransferEngine::getBaseAddr,
        &TransferEngine::numContexts, &TransferEngine::showLinks, &TransferEngine::enableGracefulShutdown);
    use(static_cast<void (TransferEngine::*)(bool)>(&TransferEngine::setAutoDiscover),
        static_cast<void (TransferEngine::*)(const AutoDiscoverConfig&)>(&TransferEngine::setAutoDiscover));
    use(&TransferEngine::ScatterTransferOperation::wait, &TransferEngine::ScatterTransferOperation::waitFor);
}

void use_objects(TransferEngine::ScatterTransferOperation&& operation, const std::vector<std::string>& filter) {
    TransferEngine engine(false), filtered(false, filter), moved(std::move(engine));
    moved = std::move(filtered);
    TransferEngine::ScatterTransferOperation other(std::move(operation));
    other = std::move(operation);
    TransferMetadata metadata("");
}

}  // namespace mooncake
