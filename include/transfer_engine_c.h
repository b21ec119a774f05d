// The C interface of Mooncake's Transfer Engine: the same functions, types and values, so that programs
// written for it work.
//
// An engine moves bytes between the memory of this process and that of its peers. A process registers
// memory, opens the segments of its peers, allocates a batch, submits requests to it, and asks for the
// status of each. New programs had better use te.h, which has deadlines, waiting, cancelling, results in one
// call, and which works on the same engines.
//
// Errors come in two forms, as ever. Functions about engines, memory, segments and notifications return 0 or
// a negative number: -1 invalid argument, -3 address not registered, -4 busy, -7 address overlapped, -101
// name not resolved, -102 connection failed, -103 malformed JSON, -200 metadata, -202 device refused, and
// those below -1000, which te.h lists. Functions about batches (submitTransfer, submitTransferWithNotify,
// getTransferStatus, freeBatchID) and getNicLoadStats return 0 or a positive number: 1 invalid argument or
// batch, 2 batch full, 3 address not registered, 4 busy, 8 transport not installed, 202 other.
// te_last_error() of te.h gives the text of a thread's last failure in either form; why a request ended as
// failed, te_batch_task_error() tells.
//
// Texts are read during the call only. A NULL text where one is needed is an error, as is a name that is not
// UTF-8; in locations and notifications, what is not UTF-8 is replaced by U+FFFD. An engine that was
// destroyed or never made, and a batch that was freed or never allocated, are errors, never a crash. Any
// thread may call any function at any time.

#ifndef TRANSFER_ENGINE_C_H
#define TRANSFER_ENGINE_C_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/// Number of a segment.
#define segment_handle_t int32_t
/// Number of a segment.
#define segment_id_t int32_t
/// Number of a batch.
#define batch_id_t uint64_t

/// From the segment into local memory.
#define OPCODE_READ 0

/// From local memory into the segment.
#define OPCODE_WRITE 1

/// Under way.
#define STATUS_WAITING 0

/// Not used.
#define STATUS_PENDING 1

/// Not used.
#define STATUS_INVALID 2

/// Not used: requests that were cancelled show as STATUS_FAILED.
#define STATUS_CANCELED 3

/// Over, and all bytes are in place: in the peer's memory (OPCODE_WRITE), or in the local range
/// (OPCODE_READ).
#define STATUS_COMPLETED 4

/// Over, since it made no progress in time. Only where the environment variable MC_SLICE_TIMEOUT is set; else
/// STATUS_FAILED.
#define STATUS_TIMEOUT 5

/// Over, and failed.
#define STATUS_FAILED 6

/// An engine. It serves the functions of te.h as well, as a te_engine *.
typedef void *transfer_engine_t;

/// An installed transport: good for a comparison with NULL.
typedef void *transport_t;

/// A range of memory.
struct buffer_entry {
    /// Its first byte.
    void *addr;
    /// Its length in bytes.
    size_t length;
};

/// A range of memory.
typedef struct buffer_entry buffer_entry_t;

/// A transfer between a range of this process and one of a segment.
struct transfer_request {
    /// OPCODE_READ or OPCODE_WRITE.
    int opcode;
    /// First byte of the local range, which need not be registered. It is the engine's until the request is
    /// over.
    void *source;
    /// The segment of the other range.
    segment_id_t target_id;
    /// First byte of the other range, as an address in the process of the segment.
    uint64_t target_offset;
    /// Length of both ranges in bytes. 0 completes at once.
    uint64_t length;
};

/// A message to or from another engine.
struct notify_msg {
    /// What it is about.
    char *name;
    /// The text.
    char *msg;
};

/// A message to or from another engine.
typedef struct notify_msg notify_msg_t;

/// What has become of a request.
struct transfer_status {
    /// A STATUS_ value.
    int status;
    /// Bytes that are known to have moved; never more than the length of the request.
    uint64_t transferred_bytes;
};

/// Load of a NIC.
struct nic_load_stat {
    /// Name, with a NUL at its end.
    char device_name[64];
    /// Bytes under way.
    uint64_t inflight_bytes;
    /// Smoothed bandwidth in bytes per second.
    double ewma_bandwidth_bps;
};

/// Load of a NIC.
typedef struct nic_load_stat nic_load_stat_t;

/// Memory in a segment_desc.
struct segment_desc_rdma {
    /// First byte.
    void *addr;
    /// Length in bytes.
    uint64_t size;
    /// Where it is.
    const char *location;
};

/// A file in a segment_desc.
struct segment_desc_nvmeof {
    /// Path.
    const char *file_path;
    /// Subsystem.
    const char *subsystem_name;
    /// Protocol.
    const char *proto;
    /// Address of the server.
    const char *ip;
    /// Port of the server.
    uint64_t port;
};

/// Either form of a segment_desc.
union segment_desc_form {
    /// Memory.
    struct segment_desc_rdma rdma;
    /// A file.
    struct segment_desc_nvmeof nvmeof;
};

/// A segment. No function uses it; it is here for programs that name it.
struct segment_desc {
    /// Which form.
    int type;
    /// The form.
    union segment_desc_form desc_;
};

/// A segment. No function uses it; it is here for programs that name it.
typedef struct segment_desc segment_desc_t;

/// A transfer.
typedef struct transfer_request transfer_request_t;

/// What has become of a request.
typedef struct transfer_status transfer_status_t;

/// The segment of the engine itself.
#define LOCAL_SEGMENT 0

/// What allocateBatchID returns when it fails.
#define INVALID_BATCH UINT64_MAX

/// Creates an engine. Returns NULL on failure; te_last_error() of te.h says why. Free it with
/// destroyTransferEngine.
///
/// metadata_conn_string is "P2PHANDSHAKE" or a metadata server, such as "http://host:8080/metadata",
/// "redis://host:6379", "etcd://host:2379", or "host:2379" for etcd.
/// With P2PHANDSHAKE, local_server_name is "host" or "host:port" of this machine; the port is drawn anew
/// (getLocalIpAndPort tells it). With a metadata server it is the name that peers open, and none that another
/// running engine has; peers connect to the environment variable MC_TCP_BIND_ADDRESS, or to the address of the
/// first network interface that is up. ip_or_host_name and rpc_port have no effect.
/// auto_discover other than 0 looks at the hardware and installs the best transport; with 0 there is none
/// until installTransport.
transfer_engine_t createTransferEngine(const char *metadata_conn_string,
                                       const char *local_server_name,
                                       const char *ip_or_host_name,
                                       uint64_t rpc_port,
                                       int auto_discover);

/// Destroys an engine: transfers that still run are cancelled, and memory is unregistered. When it returns,
/// no other call on the engine is inside the library, and the engine touches no memory of the program any
/// more. NULL is fine and does nothing.
void destroyTransferEngine(transfer_engine_t engine);

/// Looks at the NICs of this machine, for a later installTransport. Returns 0 or a negative number.
int discoverTopology(transfer_engine_t engine);

/// Writes the address at which peers reach this engine, "host:port" with IPv6 addresses in brackets, into
/// buf_out of buf_len bytes, with a NUL at its end; a text that does not fit is cut. With P2PHANDSHAKE it is
/// the name that peers open; with a metadata server they open local_server_name. Returns 0 or a negative
/// number.
int getLocalIpAndPort(transfer_engine_t engine, char *buf_out, size_t buf_len);

/// Installs a transport, registers all memory with it, and publishes it to peers. Returns NULL on failure,
/// and the engine is as it was before; te_last_error() of te.h says why. A transport that is installed
/// already is returned as it is.
///
/// proto is "tcp" or "rdma". args may be NULL; else its first element is a NIC priority matrix in JSON, or NULL.
transport_t installTransport(transfer_engine_t engine,
                             const char *proto,
                             void **args);

/// Does nothing, and returns 0.
int uninstallTransport(transfer_engine_t engine, const char *proto);

/// Opens the segment of a peer by its name. Returns its number, or -1. Gives the same number when it is open
/// already.
///
/// Asks the peer or the metadata server unless it is open. Leading '/' are not part of a name. The engine
/// looks anew by itself when a transfer fails because the peer has changed.
segment_id_t openSegment(transfer_engine_t engine, const char *segment_name);

/// Like openSegment, but asks the peer or the metadata server for the present state of the segment also if it
/// is open. If that fails, the former state is kept.
segment_id_t openSegmentNoCache(transfer_engine_t engine, const char *segment_name);

/// Does nothing, and returns 0; the number stays valid.
int closeSegment(transfer_engine_t engine, segment_id_t segment_id);

/// Does nothing, and returns 0.
int warmupEfaSegment(transfer_engine_t engine, const char *segment_name);

/// Forgets what is known here of the segment with that name, whichever process it is of. Its number becomes
/// invalid, and opening it again gives another. Returns 0, also when no such segment is open, or a negative
/// number.
int removeLocalSegment(transfer_engine_t engine, const char *segment_name);

/// Asks anew for the state of all open segments. Returns 0, also where that fails, such as for a peer that has
/// vanished: the former state is kept then, and the log names the segment.
int syncSegmentCache(transfer_engine_t engine);

/// Registers length bytes at addr, so that peers can read and write them, and publishes that. Returns 0 or a
/// negative number: -200 if the metadata server could not be told; nothing is registered then.
///
/// location says where the memory is: "cpu:0" for a NUMA node, "cuda:1" for a GPU; "*" or NULL if unknown.
/// remote_accessible 0: only this engine may use it, as the local side of transfers. The range may touch
/// registered ones, but have no byte in common with them (-7).
int registerLocalMemory(transfer_engine_t engine,
                        void *addr,
                        size_t length,
                        const char *location,
                        int remote_accessible);

/// Unregisters the memory that was registered at addr, the first byte of its range. Returns 0 or a negative
/// number: -3 if nothing was registered there, -4 if a transfer on it did not end within five seconds, so
/// that it is still in use, -200 if the metadata server could not be told, which is tried again in the
/// background. After 0 or -200 neither peers nor this engine touch it.
int unregisterLocalMemory(transfer_engine_t engine, void *addr);

/// Registers buffer_len ranges for peers to read and write: all of them or, on failure, none. Publishes once.
/// Returns 0 or a negative number. buffer_list may be NULL if buffer_len is 0.
int registerLocalMemoryBatch(transfer_engine_t engine,
                             buffer_entry_t *buffer_list,
                             size_t buffer_len,
                             const char *location);

/// Unregisters the memory that was registered at each of addr_len addresses. Publishes once. An address that
/// fails does not keep the others from being released; the first failure is returned, else 0. addr_list may
/// be NULL if addr_len is 0.
int unregisterLocalMemoryBatch(transfer_engine_t engine, void **addr_list, size_t addr_len);

/// Allocates a batch with room for batch_size requests. Returns its number, or INVALID_BATCH. Free it with
/// freeBatchID.
batch_id_t allocateBatchID(transfer_engine_t engine, size_t batch_size);

/// Starts count requests. They take the next numbers in the batch, from 0 on. Returns 0 or a positive number:
/// 1 for a bad argument, such as an unknown segment, an opcode other than OPCODE_READ and OPCODE_WRITE, or a
/// NULL source; 2 if the batch has not that much room; 8 if the transport of the segment is not installed. On
/// failure nothing is started. Requests that fail after that tell so by their status.
int submitTransfer(transfer_engine_t engine,
                   batch_id_t batch_id,
                   struct transfer_request *entries,
                   size_t count);

/// Like submitTransfer, and sends notify_msg to the engine of the first request's segment when all requests
/// of the call have completed, so that the peer finds the bytes in place; not at all if one fails. count may
/// not be 0. The texts are copied.
int submitTransferWithNotify(transfer_engine_t engine,
                             batch_id_t batch_id,
                             struct transfer_request *entries,
                             size_t count,
                             notify_msg_t notify_msg);

/// Tells what has become of request number task_id of a batch. Returns 0 or a positive number: 1 if there is
/// no such request or batch, and status is left alone then. STATUS_COMPLETED, STATUS_TIMEOUT and
/// STATUS_FAILED are final, and the engine touches no memory of the request any more.
int getTransferStatus(transfer_engine_t engine,
                      batch_id_t batch_id,
                      size_t task_id,
                      struct transfer_status *status);

/// Frees a batch. Returns 0 or a positive number: 4 while a request is under way, and the batch stays as it
/// is. Requests need not have been asked for before.
int freeBatchID(transfer_engine_t engine, batch_id_t batch_id);

/// Takes all messages that have arrived at this engine, in the order of their arrival. Returns an array of
/// *size messages, which the caller frees with freeNotifsMsgBuf; NULL and 0 if there are none or on failure.
notify_msg_t *getNotifsFromEngine(transfer_engine_t engine, int *size);

/// Frees what getNotifsFromEngine returned. (NULL, 0) is fine. Returns 0.
int freeNotifsMsgBuf(notify_msg_t *msg_list, int size);

/// Sends a message to the engine of a segment, and returns when it has arrived there: 0, or a negative
/// number, -200 if the segment is unknown. The texts are copied.
int genNotifyInEngine(transfer_engine_t engine, uint64_t target_id, notify_msg_t notify_msg);

/// Tells the load of each NIC: *count is the room in stats before, and the number of NICs, which may be more,
/// after the call. None without RDMA. Returns 0, or -1 if an argument is NULL.
int getNicLoadStats(transfer_engine_t engine, nic_load_stat_t *stats, size_t *count);

/// From now on this engine is shut down when the process calls exit() or gets SIGTERM or SIGINT; the process
/// then ends with status 128 plus the number of the signal. Replaces what the program had set for these two
/// signals. Without this call the library leaves signals alone.
void enableGracefulShutdown(transfer_engine_t engine);

/// Writes a description of the NICs and of which one serves which memory into buf of buf_len bytes, with a
/// NUL at its end: in JSON if json is not 0, else for people. A text that does not fit is cut. Returns 0 or a
/// negative number.
int showLinks(transfer_engine_t engine, char *buf, size_t buf_len, int json);

#ifdef __cplusplus
}
#endif

#endif
