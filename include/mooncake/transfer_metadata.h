// What engines tell each other: descriptors of segments, where handshakes go, and the handshakes themselves.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "common.h"
#include "topology.h"
#include "transfer_engine_cxx/export.h"
#include "transfer_engine_cxx/json.h"

// The metadata server that is none: engines ask each other.
#define P2PHANDSHAKE "P2PHANDSHAKE"

namespace mooncake {

// The key of registered memory with a NIC.
using mr_key_t = uint32_t;

// Metadata, of an engine or of its own.
//
// TransferEngine::getMetadata gives that of an engine: it reads what the engine knows and asks the engine to publish.
// The engine itself keeps its own descriptor, so the functions that put a descriptor together answer
// ERR_NOT_IMPLEMENTED there. An object that a program makes is a client of the metadata server by itself.
//
// Any thread may call any function. Functions that return int give 0 or a negative ERR_ number.
class TRANSFER_ENGINE_CXX_API TransferMetadata {
   public:
    using SegmentID = uint64_t;

    struct DeviceDesc {
        std::string name;
        uint16_t lid;
        std::string gid;
        std::string eid;
        bool operator==(const DeviceDesc&) const = default;
    };

    // A range of registered memory.
    struct BufferDesc {
        // Where it is; with TCP the name of the segment.
        std::string name;
        uint64_t addr;
        uint64_t length;
        int32_t device_id = -1;
        // One for each device.
        std::vector<mr_key_t> lkey;
        std::vector<mr_key_t> rkey;
        std::string shm_name;
        uint64_t offset;
        std::vector<std::string> tseg;
        std::vector<uint32_t> l_seg_index;
        bool operator==(const BufferDesc&) const = default;
    };

    struct NVMeoFBufferDesc {
        std::string file_path;
        uint64_t length;
        std::unordered_map<std::string, std::string> local_path_map;
        bool operator==(const NVMeoFBufferDesc&) const = default;
    };

    struct RankInfoDesc {
        uint64_t rankId = 0xFFFFFFFF;
        std::string hostIp;
        uint64_t hostPort;
        uint64_t deviceLogicId;
        uint64_t devicePhyId;
        uint64_t deviceType = 5;
        std::string deviceIp;
        uint64_t devicePort;
        uint64_t pid;
        std::vector<std::string> endpoints;
        bool operator==(const RankInfoDesc&) const = default;
    };

    struct SegmentDesc {
        std::string name;
        std::string protocol;
        std::vector<DeviceDesc> devices;
        Topology topology;
        // In the order in which they were registered.
        std::vector<BufferDesc> buffers;
        std::vector<NVMeoFBufferDesc> nvmeof_buffers;
        std::string cxl_name;
        uint64_t cxl_base_addr = 0;
        // When it was published, in local time.
        std::string timestamp;
        RankInfoDesc rank_info{};
        int tcp_data_port = 0;
        int tcp_proto_version = 1;
        std::string rdma_server_name;

        // The name that paths of NICs begin with.
        const std::string& nicPathServerName() const { return rdma_server_name.empty() ? name : rdma_server_name; }
        // Whether they say the same, whenever and by which protocol version they were published.
        bool operator==(const SegmentDesc& other) const;
        // Writes it to standard error.
        void dump() const;
    };

    // Where the handshakes of an engine go.
    struct RpcMetaDesc {
        std::string ip_or_host_name;
        uint16_t rpc_port = 0;
        // A socket that is bound to the port, or -1.
        int sockfd = -1;
    };

    struct HandShakeDesc {
        std::string payload;
        std::string local_nic_path;
        uint16_t local_lid = 0;
        std::string local_gid;
        std::string peer_nic_path;
        std::vector<uint32_t> qp_num;
        bool ready_ack = false;
        bool ready_ack_supported = false;
        // Why it was refused; "" if it was not.
        std::string reply_msg;
    };

    // A message from one engine to another.
    struct NotifyDesc {
        std::string name;
        std::string notify_msg;
    };

    // Answers a handshake of a peer. Called on the thread of the daemon.
    using OnReceiveHandShake = std::function<int(const HandShakeDesc& peer_desc, HandShakeDesc& local_desc)>;

    // A client of a metadata server, or of peers with P2PHANDSHAKE. Throws std::runtime_error if the server
    // refuses or there is no such kind of server.
    explicit TransferMetadata(const std::string& conn_string);
    TransferMetadata(const TransferMetadata&) = delete;
    TransferMetadata& operator=(const TransferMetadata&) = delete;
    ~TransferMetadata();

    // The descriptor of a segment: null if it is not known or cannot be fetched. The object is shared by all who
    // ask, and another takes its place when the segment changes. `force_update` asks the server or peer anew; if
    // that fails, the former state is given.
    std::shared_ptr<SegmentDesc> getSegmentDescByName(const std::string& segment_name, bool force_update = false);
    std::shared_ptr<SegmentDesc> getSegmentDescByID(SegmentID segment_id, bool force_update = false);
    // The same, fetched now, and the caller's own.
    std::shared_ptr<SegmentDesc> getSegmentDesc(const std::string& segment_name);
    // The number of a segment, -1 on failure.
    SegmentID getSegmentID(const std::string& segment_name);

    // Publishes the descriptor of this engine, as it is now.
    int updateLocalSegmentDesc(SegmentID segment_id = LOCAL_SEGMENT_ID);
    // Publishes a descriptor under a name.
    int updateSegmentDesc(const std::string& segment_name, const SegmentDesc& desc);
    // Fetches the descriptors that are known here anew, of one segment or ("") of all.
    int syncSegmentCache(const std::string& segment_name = "");
    // Forgets what is known here of a segment.
    int removeSegmentDesc(const std::string& segment_name);

    int addLocalSegment(SegmentID segment_id, const std::string& segment_name, std::shared_ptr<SegmentDesc>&& desc);
    int removeLocalSegment(const std::string& segment_name);
    int addLocalMemoryBuffer(const BufferDesc& buffer_desc, bool update_metadata);
    int removeLocalMemoryBuffer(void* addr, bool update_metadata);

    int addRpcMetaEntry(const std::string& server_name, RpcMetaDesc& desc);
    int removeRpcMetaEntry(const std::string& server_name);
    // Publishes again where handshakes of this engine go, if the server has forgotten it.
    int rePublishRpcMetaEntry(const std::string& server_name);
    int getRpcMetaEntry(const std::string& server_name, RpcMetaDesc& desc);
    const RpcMetaDesc& localRpcMeta() const;

    // Answers handshakes on `sockfd`, which is bound and becomes this object's, or on `listen_port` if that is -1.
    int startHandshakeDaemon(OnReceiveHandShake on_receive_handshake, uint16_t listen_port, int sockfd);
    int sendHandshake(const std::string& peer_server_name, const HandShakeDesc& local_desc, HandShakeDesc& peer_desc);
    // Sends a message to the engine of that name.
    int sendNotify(const std::string& peer_server_name, const NotifyDesc& local_desc, NotifyDesc& peer_desc);
    // Appends the messages that have arrived.
    int getNotifies(std::vector<NotifyDesc>& notifies);
    // 0 if the engine of that name answers.
    int sendProbe(const std::string& peer_server_name);

    // How metadata is kept. The library's.
    class Source;
    explicit TransferMetadata(std::unique_ptr<Source> source);

   private:
    const std::unique_ptr<Source> source_;
};

}  // namespace mooncake
