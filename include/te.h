// Transfer engine: registers memory of this process and moves it to and from the memory of other processes.
//
// An engine has a name, under which peers open it as a *segment*. A process registers the memory that peers
// may read and write, opens the segments of its peers, and asks for transfers between its own memory and
// ranges of theirs: many at once in a batch, synchronously or with a status to poll or wait for. A transfer
// is over only when the engine will not touch its memory again.
//
// A program that writes a buffer into a peer's memory, without the checks of the returned values:
//
//     te_engine *engine;
//     te_segment peer;
//     te_memory_region target = {.struct_size = sizeof target};
//     size_t count;
//
//     te_engine_create(NULL, &engine);
//     te_register_local_memory(engine, buffer, length, NULL);
//     te_open_segment(engine, "10.0.0.7:15002", &peer);
//     te_list_segment_memory(engine, peer, &target, sizeof target, 1, &count);
//
//     te_transfer_request request = {
//         .opcode = TE_WRITE, .local = buffer, .segment = peer, .remote_addr = target.addr, .length = length};
//     if (te_batch_transfer(engine, &request, sizeof request, 1, NULL, NULL, 0) != 0)
//         fprintf(stderr, "%s\n", te_last_error());
//
//     te_engine_destroy(engine);
//
// Conventions
//
// Results. Functions return a te_status: 0, or one of the negative TE_ERR_ numbers. After a failure
// te_last_error() gives its text. Outputs are the last parameters and are written only on success, unless
// the function says otherwise.
//
// Texts. Strings are NUL-terminated UTF-8, are read during the call only, and may not be NULL unless that is
// said to mean something. Locations and the texts of notifications may be any bytes; what is not UTF-8 in
// them is replaced by U+FFFD.
//
// Structs that grow. Later versions add fields at the end of structs, never elsewhere, so a program and a
// library of different versions work together. Structs that are passed alone begin with `struct_size`: set
// it to sizeof the struct, and the rest to zero before setting fields. Functions that take arrays of structs
// take the size of one element as well. The library reads fields that the caller's struct does not have as
// their defaults. It refuses a struct that is larger than it knows with TE_ERR_INVALID_ARGUMENT if one of
// the unknown bytes of an input is not zero; unknown bytes of an output are set to zero. Sizes below that of
// the first version or above 4096 are refused. Fields named `reserved` must be zero. A NULL pointer to an
// options struct stands for all defaults.
//
// Handles. Engines, pools, topologies and stores are keys, not addresses; segments, batches and leases are
// numbers. One that was destroyed, freed or never made gives TE_ERR_INVALID_HANDLE, and a number is not used
// again for something else. The handle of an engine serves the functions of transfer_engine_c.h as well, and
// the other way round.
//
// Threads. Any thread may call any function at any time, also on the same engine, batch or segment, unless a
// function says otherwise. te_engine_destroy wakes up the threads that wait in other calls on the engine.
//
// Memory. The memory of a transfer must stay valid until the transfer is over, registered memory until it is
// unregistered. Memory of the caller may be freed once te_unregister_local_memory has returned 0.
//
// Processes. A child made by fork() cannot use its parent's engines, pools, topologies and stores: calls give
// TE_ERR_FORKED. It may create its own.
//
// Signals. The library installs no signal handler (but see enableGracefulShutdown), never ends the process,
// and never writes to standard output.

#ifndef TE_H
#define TE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// ----------------------------------------------------------------------------------------------------
// Version, errors, texts and log

/// How important a line of the log is. A level includes those above it.
typedef enum te_log_level {
    /// Something failed for good.
    TE_LOG_ERROR = 1,
    /// A call failed, or something will go wrong later. The default.
    TE_LOG_WARNING = 2,
    /// Life cycle: engines, transports, segments.
    TE_LOG_INFO = 3,
    /// Connections and registrations.
    TE_LOG_DEBUG = 4,
    /// Every transfer.
    TE_LOG_TRACE = 5,
} te_log_level;

/// What a function returns: TE_OK or a negative TE_ERR_ number.
typedef int32_t te_status;

/// Receives a line of the log.
///
/// It is called on any thread, also on threads of the engine and during calls of the program, and on several
/// threads at once. It must not block for long, and not destroy or create engines; lines that its own calls
/// would make are left out. `target` names the part of the library that speaks; both texts are valid during
/// the call only, and have no line break at their end.
typedef void (*te_log_callback)(void *user_data,
                                te_log_level level,
                                const char *target,
                                const char *message);

/// Success.
#define TE_OK 0

/// An argument is out of range, NULL where it may not be, or contradicts another one.
#define TE_ERR_INVALID_ARGUMENT -1

/// The batch has no room for that many more requests. Nothing was queued.
#define TE_ERR_TOO_MANY_REQUESTS -2

/// No registration has that address.
#define TE_ERR_ADDRESS_NOT_REGISTERED -3

/// Work is still under way on the batch, the memory or the pool. Call again later.
#define TE_ERR_BATCH_BUSY -4

/// There is no such device.
#define TE_ERR_DEVICE_NOT_FOUND -6

/// The range has bytes in common with a registered one.
#define TE_ERR_ADDRESS_OVERLAPPED -7

/// A host name could not be resolved.
#define TE_ERR_DNS -101

/// A connection could not be made, or broke.
#define TE_ERR_SOCKET -102

/// A peer, a server or the caller gave what is not the expected JSON.
#define TE_ERR_MALFORMED_JSON -103

/// A peer refused to connect.
#define TE_ERR_REJECT_HANDSHAKE -104

/// Metadata could not be fetched or published.
#define TE_ERR_METADATA -200

/// An endpoint of a device could not be made.
#define TE_ERR_ENDPOINT -201

/// A device refused to register memory.
#define TE_ERR_CONTEXT -202

/// Memory ran out.
#define TE_ERR_MEMORY -302

/// This build or this version cannot do it.
#define TE_ERR_NOT_IMPLEMENTED -303

/// The protocol of the target segment is not installed in this engine.
#define TE_ERR_NOT_SUPPORTED_TRANSPORT -1001

/// The deadline passed.
#define TE_ERR_TIMEOUT -1002

/// Cancelled: by te_batch_cancel, by unregistering the memory, or by destroying the engine.
#define TE_ERR_CANCELED -1003

/// A defect of this library. Please report it with the text.
#define TE_ERR_INTERNAL -1004

/// Memory is not mapped, or not with the needed access.
#define TE_ERR_FAULT -1005

/// The engine belongs to the process that this one was forked from.
#define TE_ERR_FORKED -1006

/// The engine, pool, lease, batch or segment was destroyed, freed, or never made.
#define TE_ERR_INVALID_HANDLE -1007

/// A limit of the process or the system was reached, such as that of open files. The text names it.
#define TE_ERR_LIMIT -1008

/// The version of the library that is loaded, such as "0.1.0". The text is static.
const char *te_version(void);

/// The text of the last failure of a call on this thread, of this interface or that of transfer_engine_c.h;
/// "" if there was none.
///
/// The text belongs to the library. It stays at the same address for the life of the thread, and is replaced
/// when the next call on the thread fails; calls that succeed leave it alone. It may have several sentences:
/// what failed, with addresses and limits, and what to do.
const char *te_last_error(void);

/// The name of a status, such as "TE_ERR_TIMEOUT"; "unknown" for other numbers. The text is static.
const char *te_status_name(te_status status);

/// Frees a text that a function of this interface gave by a `char **`. NULL is fine. The text is from
/// malloc(), so free() does as well.
void te_free_text(char *text);

/// Sends the log of all engines of this process to `callback` instead of to standard error.
///
/// `callback` gets the lines of `level` (a te_log_level) and those more important, and `user_data` with each.
/// NULL sends the log to standard error again, or to the file of MC_LOG_DIR. When this function has returned,
/// no thread is inside the callback that was set before, so `user_data` may be freed. Errors:
/// TE_ERR_INVALID_ARGUMENT for an unknown level, or when called by a log callback.
te_status te_set_log_callback(te_log_callback callback, void *user_data, int32_t level);

// ----------------------------------------------------------------------------------------------------
// Topologies
//
// A topology says which NICs serve which memory: for each location, such as "cpu:0" or "cuda:1", the NICs to
// prefer and those that may be used as well. It is looked up in the hardware, or given as a NIC priority
// matrix: {"cpu:0": [["mlx5_0"], ["mlx5_1"]], ...} in JSON. An engine has one of its own; a program that
// wants to see or change it before a transport is installed makes one, and gives it to the engine in
// te_engine_options. A change of a topology holds for transports that are installed later.

/// A topology.
typedef struct te_topology te_topology;

/// Creates a topology with nothing in it. Free it with te_topology_destroy.
te_status te_topology_create(te_topology **topology);

/// Destroys the handle of a topology. Engines that have it keep it. NULL is fine and does nothing.
te_status te_topology_destroy(te_topology *topology);

/// Looks at the NICs of this machine and puts them in, in place of what was there: a location for each NUMA
/// node, whose own NICs are preferred, while all others may be used. A machine without NICs is no error.
///
/// Only NICs that the process may open and of which a port is up. `nics` is an array of `count` names of
/// those to take; any if there are none. The environment variable MC_TE_FILTERS, read at each call, holds as
/// well.
te_status te_topology_discover(te_topology *topology, const char *const *nics, size_t count);

/// Puts a NIC priority matrix in, in place of what was there. It may name NICs that this machine does not have.
///
/// Errors: TE_ERR_MALFORMED_JSON; what was there stays.
te_status te_topology_parse(te_topology *topology,
                            const char *json);

/// Gives the NIC priority matrix, without NICs that are disabled; "{}" if there is nothing in it. `json`
/// receives a text that the caller frees with te_free_text.
te_status te_topology_json(te_topology *topology, char **json);

/// Gives the name of NIC number `index`. NICs are numbered from 0, in the order in which the matrix names
/// them for the first time, locations being in the order of their texts and preferred NICs before others. One
/// that is disabled keeps its number.
///
/// `name` receives a text that the caller frees with te_free_text. Errors: TE_ERR_DEVICE_NOT_FOUND for a
/// number beyond the last.
te_status te_topology_nic_name(te_topology *topology, size_t index, char **name);

/// Describes the NICs, as the system knows them, and which one serves which memory: in JSON if `as_json` is
/// not 0, an object with "local_nics" and "topology", else for people.
///
/// `text` receives a text that the caller frees with te_free_text.
te_status te_topology_links(te_topology *topology, int as_json, char **text);

/// Chooses a NIC for memory at `location`, as transports do. "*" is a location that all NICs serve.
///
/// `retry` 0 takes one of the preferred NICs, at random, or in turn if the environment variable
/// MC_PATH_ROUNDROBIN said so when the topology was made; that of the name `hint`, which may be NULL, if it
/// is one of them. 1 and more walk through the preferred NICs and then the others. `index` receives the
/// number of the NIC. Errors: TE_ERR_DEVICE_NOT_FOUND if there is no such location, or no NIC for it.
te_status te_topology_select(te_topology *topology,
                             const char *location,
                             const char *hint,
                             uint32_t retry,
                             size_t *index);

/// Takes a NIC out of all lists, until something is put in anew. Errors: TE_ERR_DEVICE_NOT_FOUND if there is
/// none of that name.
te_status te_topology_disable(te_topology *topology, const char *nic);

/// Has an address of this program stand for a topology, for a class that has one before it has an engine:
/// showLinks and discoverTopology of transfer_engine_c.h work on a cast of the address, too.
///
/// As te_engine_set_alias, which may give the address to an engine later. Errors: those of it, and
/// TE_ERR_INVALID_ARGUMENT for the address of an engine.
te_status te_topology_set_alias(te_topology *topology, const void *address);

// ----------------------------------------------------------------------------------------------------
// Engine
//
// An engine is a place in the cluster: it has a name that peers open, threads that serve them, and the
// transports by which bytes move. Most processes have one. Creating it reads the environment variables MC_*
// and TE_*.

/// An engine.
typedef struct te_engine te_engine;

/// How te_engine_create makes an engine.
typedef struct te_engine_options {
    /// sizeof(te_engine_options).
    size_t struct_size;
    /// Where descriptors of segments are kept: "P2PHANDSHAKE" (also if NULL), with the engines themselves, which
    /// ask each other; or at a metadata server, such as "http://host:8080/metadata", "redis://host:6379",
    /// "etcd://host:2379", or "host:2379" for etcd. MC_METADATA_CLUSTER_ID keeps clusters apart that share one.
    const char *metadata;
    /// With P2PHANDSHAKE, "host" or "host:port" (IPv6 addresses with a port in brackets). Host is the address of
    /// this machine that peers use; the port is drawn anew, and te_engine_address tells it. NULL: an address of
    /// this machine is chosen.
    ///
    /// With a metadata server, the name that peers open: any text that no other running engine has. If two
    /// have the same, peers find the one that came last. NULL: what te_engine_address tells. Peers connect to
    /// MC_TCP_BIND_ADDRESS, or to the address of the first network interface that is up.
    const char *server_name;
    /// The transport to install: "tcp" (also if NULL), "rdma", "auto" for RDMA where a NIC is found that can
    /// be used and TCP elsewhere, or "" for none yet.
    const char *transport;
    /// For the transport: a NIC priority matrix in JSON, or NULL to look at the hardware. "tcp" has no use
    /// for it.
    const char *topology;
    /// Names of the NICs that may be found when the engine looks at the hardware: an array of `nic_count`.
    /// NULL: any. MC_TE_FILTERS holds as well.
    const char *const *nics;
    /// Number of the names.
    size_t nic_count;
    /// A topology that the engine has in place of one of its own, and goes on having when this handle is
    /// destroyed: what the engine finds or is given goes there, and a transport that is installed without a
    /// matrix of its own goes by what is there then. NULL: its own, which te_engine_topology gives.
    te_topology *topology_handle;
} te_engine_options;

/// Creates an engine and starts to serve peers. Free it with te_engine_destroy.
///
/// `options` may be NULL. Errors: TE_ERR_SOCKET and TE_ERR_LIMIT when no port could be taken;
/// TE_ERR_METADATA when the metadata server does not answer within some seconds, or refuses;
/// TE_ERR_NOT_IMPLEMENTED for an unknown kind of metadata server or transport.
te_status te_engine_create(const te_engine_options *options, te_engine **engine);

/// Destroys an engine: transfers that still run end as TE_STATE_CANCELED, threads that wait in other calls
/// return, memory is unregistered, batches are freed, and peers are no longer served.
///
/// When it returns, no other call on the engine is inside the library, and the engine touches no memory of
/// the program any more; it takes up to about five seconds where a peer is slow. A metadata server forgets
/// the engine; up to ten seconds are waited for one that does not answer. Calls that begin meanwhile or later give TE_ERR_INVALID_HANDLE, as does destroying it twice. NULL is fine and does nothing.
te_status te_engine_destroy(te_engine *engine);

/// Writes the address at which peers reach this engine, such as "10.0.0.7:15002", into `buffer`, with a NUL at
/// its end.
///
/// With P2PHANDSHAKE it is the name that peers open; with a metadata server they open the `server_name` of
/// te_engine_options. `size` is that of the buffer in bytes; if the text does not fit,
/// TE_ERR_INVALID_ARGUMENT, and the text of the error tells the size it takes.
te_status te_engine_address(te_engine *engine,
                            char *buffer,
                            size_t size);

/// Installs a transport, registers all memory with it, and publishes it to peers. Installing one that is
/// there already gives 0.
///
/// `protocol` is "tcp", "rdma" or "auto", which looks at the hardware and installs the better one. `topology`
/// is a NIC priority matrix in JSON, which takes the place of what is in the engine's topology, or NULL. On
/// failure the engine is as it was before. Calls that register or unregister memory wait meanwhile. Errors:
/// TE_ERR_NOT_IMPLEMENTED for protocols that this build lacks.
te_status te_install_transport(te_engine *engine, const char *protocol, const char *topology);

/// Tells whether a transport is installed: `installed` receives 1, or 0. `protocol` is "tcp", "rdma", or any
/// other text, which is the name of none.
te_status te_has_transport(te_engine *engine, const char *protocol, int *installed);

/// Gives a handle of the topology of an engine: the very one that was given when it was created, or the
/// engine's own. Free it with te_topology_destroy; it may outlive the engine.
te_status te_engine_topology(te_engine *engine, te_topology **topology);

/// Describes the NICs of an engine and which one serves which memory: in JSON if `as_json` is not 0, else for
/// people. As te_topology_links, but of NICs that a transport uses it tells the port and the address that are
/// in use.
///
/// `text` receives a text that the caller frees with te_free_text.
te_status te_engine_links(te_engine *engine, int as_json, char **text);

/// Has an address of this program stand for an engine, in this interface and in that of transfer_engine_c.h:
/// a class that wraps an engine gives its object's, and a cast of the object's address to te_engine * or
/// transfer_engine_t does as well as the handle.
///
/// It does so until the engine is destroyed, or another address is given, or NULL, which gives none. What
/// else stood for the address, an engine or a topology, is not found by it any more. The memory there is
/// never looked at. A call by an address takes some ten nanoseconds more. Errors: TE_ERR_INVALID_ARGUMENT for
/// an address that looks like a handle; TE_ERR_LIMIT when 1024 addresses of the process stand for something.
te_status te_engine_set_alias(te_engine *engine, const void *address);

/// Has the metadata server told of all memory that has been registered and unregistered so far, also with
/// TE_PUBLISH_LATER, and returns when it knows. Without a metadata server there is nothing to do: peers ask
/// the engine itself.
///
/// Errors: TE_ERR_METADATA, and it is tried again in the background.
te_status te_publish(te_engine *engine);

/// Writes to the metadata server where this engine is reached, whatever it has about that. The engine looks
/// after it by itself every two seconds; this is for a program that cannot wait. Without a metadata server
/// there is nothing to do.
///
/// Errors: TE_ERR_METADATA.
te_status te_publish_address(te_engine *engine);

/// Ends all that an engine does, as te_engine_destroy, and leaves the handle: when it has returned, no byte
/// moves, peers are no longer served, and the engine touches no memory of the program any more, but for that of calls
/// of te_put and te_get that have not returned yet; calls on it give TE_ERR_CANCELED, but for those that only tell what is known, such as the status of a batch. Destroy
/// it when its handle is of no use any more. Doing it twice gives 0.
te_status te_shut_down(te_engine *engine);

// ----------------------------------------------------------------------------------------------------
// Memory
//
// Peers reach registered memory only. Ranges are half open: they may touch, but no byte may be in two of
// them. The cost of registering and unregistering hardly depends on how much is registered already.

/// Peers may read and write the memory.
#define TE_ACCESS_REMOTE 0

/// Only transfers of this engine may use the memory, as their local side.
#define TE_ACCESS_LOCAL 1

/// Peers learn of the change before the call returns.
#define TE_PUBLISH_NOW 0

/// Peers learn of the registration with the next one, or the next unregistration, that is published. Saves time
/// where a metadata server is slow. Without one it makes no difference: peers ask when they need it.
#define TE_PUBLISH_LATER 1

/// As the environment variable TE_REGISTER_REFCOUNT says; without it, as TE_REFERENCES_OFF.
#define TE_REFERENCES_DEFAULT 0

/// Registering the same range, location and access again succeeds, and it stays until it has been
/// unregistered as often.
#define TE_REFERENCES_ON 1

/// Registering a range again gives TE_ERR_ADDRESS_OVERLAPPED.
#define TE_REFERENCES_OFF 2

/// As the environment variable MC_ENABLE_PARALLEL_REG_MR says; without it, as TE_PARALLEL_AUTO.
#define TE_PARALLEL_DEFAULT 0

/// Devices register the memory side by side where that is faster.
#define TE_PARALLEL_AUTO 1

/// Devices register the memory one after the other.
#define TE_PARALLEL_OFF 2

/// Devices register the memory side by side, whatever its size.
#define TE_PARALLEL_ON 3

/// How memory is registered.
typedef struct te_memory_options {
    /// sizeof(te_memory_options).
    size_t struct_size;
    /// Where the memory is: "cpu:0" for a NUMA node, "cuda:1" for a GPU; "*" or NULL: found out when it
    /// matters. Transports choose NICs by it. Unknown texts count as "*".
    const char *location;
    /// TE_ACCESS_REMOTE or TE_ACCESS_LOCAL.
    uint32_t access;
    /// TE_PUBLISH_NOW or TE_PUBLISH_LATER.
    uint32_t publish;
    /// TE_REFERENCES_DEFAULT, TE_REFERENCES_ON or TE_REFERENCES_OFF.
    uint32_t count_references;
    /// TE_PARALLEL_DEFAULT, TE_PARALLEL_AUTO, TE_PARALLEL_OFF or TE_PARALLEL_ON. Without a device that memory is
    /// registered with, as with TCP, all are the same.
    uint32_t parallel;
} te_memory_options;

/// A range of memory of this process.
typedef struct te_buffer {
    /// Its first byte.
    void *addr;
    /// Its length in bytes.
    size_t length;
} te_buffer;

/// A registered range of memory, of this process or of a peer.
typedef struct te_memory_region {
    /// sizeof(te_memory_region). Functions that fill arrays set it.
    size_t struct_size;
    /// First byte, in the address space of the process that registered it.
    uint64_t addr;
    /// Length in bytes.
    uint64_t length;
    /// TE_ACCESS_REMOTE or TE_ACCESS_LOCAL.
    uint32_t access;
    /// Zero.
    uint32_t reserved;
    /// Where the memory is, with a NUL at its end; longer texts are cut. For memory of a peer over TCP it is the
    /// peer's name: the protocol does not tell more.
    char location[64];
} te_memory_region;

/// A part of a range of memory that is in one place.
typedef struct te_location_entry {
    /// sizeof(te_location_entry). Functions that fill arrays set it.
    size_t struct_size;
    /// First byte.
    uint64_t addr;
    /// Length in bytes.
    uint64_t length;
    /// Where it is, with a NUL at its end: "cpu:0" for a NUMA node, "*" if it is not known.
    char location[64];
} te_location_entry;

/// What registering a range with devices took, in nanoseconds. Of ranges that were registered in one call each
/// shows what the whole call took.
typedef struct te_registration_cost {
    /// sizeof(te_registration_cost).
    size_t struct_size;
    /// From the beginning of the call to its end. The parts below, without the times of single devices, add up
    /// to it.
    uint64_t total_ns;
    /// Finding out which pages are there.
    uint64_t residency_ns;
    /// Having the kernel provide the pages that are not.
    uint64_t population_ns;
    /// From the first call that registers with a device to the end of the last: ibv_reg_mr or its like.
    uint64_t pinning_ns;
    /// Telling a metadata server, together with others that did so at the time.
    uint64_t publishing_ns;
    /// Everything else: this library's own work.
    uint64_t book_keeping_ns;
    /// How many threads took part, the caller's among them.
    uint32_t threads;
    /// Number of devices.
    uint32_t device_count;
} te_registration_cost;

/// What registering a range with one device took.
typedef struct te_device_cost {
    /// sizeof(te_device_cost). Functions that fill arrays set it.
    size_t struct_size;
    /// Inside the calls that register with the device, added up. Those of several devices overlap where they work
    /// side by side.
    uint64_t pinning_ns;
    /// The device, such as "mlx5_0", with a NUL at its end; longer names are cut.
    char name[64];
} te_device_cost;

/// Registers `length` bytes at `addr`, until te_unregister_local_memory or te_engine_destroy.
///
/// `options` may be NULL. On failure nothing is registered. Errors: TE_ERR_INVALID_ARGUMENT for NULL, no
/// bytes, or a range past the end of the address space; TE_ERR_ADDRESS_OVERLAPPED, with the other range in
/// the text; TE_ERR_METADATA if the metadata server could not be told; TE_ERR_CONTEXT, TE_ERR_LIMIT and TE_ERR_FAULT if a
/// device or the system refused.
te_status te_register_local_memory(te_engine *engine,
                                   void *addr,
                                   size_t length,
                                   const te_memory_options *options);

/// Unregisters the memory that was registered at `addr`, the first byte of its range.
///
/// It refuses new transfers on the memory at once, ends those under way within a fraction of a second, and
/// then releases it. After 0, neither peers nor this engine touch it. Call it before the memory is unmapped:
/// what is mapped at a registered address later is open to peers as well. Errors: TE_ERR_ADDRESS_NOT_REGISTERED;
/// TE_ERR_BATCH_BUSY if a transfer did not end within five seconds: the memory is still in use, and the call
/// can be repeated; TE_ERR_METADATA if the metadata server could not be told, though the memory is released: that
/// is tried again in the background; TE_ERR_INVALID_ARGUMENT for the arena of a pool, which te_pool_close unregisters.
te_status te_unregister_local_memory(te_engine *engine,
                                     void *addr);

/// Registers `count` ranges with the same options: all of them or, on failure, none. Peers are told once.
///
/// `buffers` is an array with elements of `buffer_size` bytes, sizeof(te_buffer); it may be NULL if `count`
/// is 0. Errors as for te_register_local_memory; ranges may not overlap each other either.
te_status te_register_local_memory_batch(te_engine *engine,
                                         const te_buffer *buffers,
                                         size_t buffer_size,
                                         size_t count,
                                         const te_memory_options *options);

/// Unregisters the memory that was registered at each of `count` addresses. Peers are told once.
///
/// An address that fails does not keep the others from being released; the first failure is returned. `addrs`
/// may be NULL if `count` is 0. Errors as for te_unregister_local_memory.
te_status te_unregister_local_memory_batch(te_engine *engine, void *const *addrs, size_t count);

/// Finds the registered range of this engine that holds the byte at `addr`, also one that is being registered or
/// unregistered, and describes it in `region`.
///
/// Set `region->struct_size` before the call. Errors: TE_ERR_ADDRESS_NOT_REGISTERED.
te_status te_find_local_memory(te_engine *engine,
                               const void *addr,
                               te_memory_region *region);

/// Finds a registered range of this engine that has a byte in common with the `length` bytes at `addr`, also
/// one that is being registered or unregistered, and describes it in `region`.
///
/// Set `region->struct_size` before the call. Errors: TE_ERR_ADDRESS_NOT_REGISTERED if there is none, as for
/// no bytes.
te_status te_find_overlap(te_engine *engine,
                          const void *addr,
                          size_t length,
                          te_memory_region *region);

/// Finds out where memory of this process is. Pages that the process has not touched have no place yet: they
/// count as "*", and stay untouched.
///
/// The `length` bytes at `addr`, which need not be registered, are described in order of address, as parts
/// that touch. With `first_page_only` other than 0 it is one part, which is where its first page is; else
/// each page is asked for, which takes one system call for 512 pages. `entries` is an array of `capacity`
/// elements of `entry_size` bytes, sizeof(te_location_entry); it may be NULL if `capacity` is 0. `count`
/// receives how many parts there are, which may be more than `capacity`; the first `capacity` are described
/// then. Errors: TE_ERR_INVALID_ARGUMENT for a range that is NULL or runs past the end of the address space.
te_status te_memory_location(const void *addr,
                             size_t length,
                             int first_page_only,
                             te_location_entry *entries,
                             size_t entry_size,
                             size_t capacity,
                             size_t *count);

/// Tells what registering the range took that holds the byte at `addr`, and what of that was each device's.
///
/// Set `cost->struct_size` before the call. `devices` is an array of `capacity` elements of `device_size` bytes,
/// sizeof(te_device_cost); it may be NULL if `capacity` is 0. `cost->device_count` may be more than `capacity`;
/// the first `capacity` are described then. Errors: TE_ERR_ADDRESS_NOT_REGISTERED, also for a range that neither a
/// device nor a metadata server was told of, as with TCP and P2PHANDSHAKE: registering that is only a matter of
/// some hundred nanoseconds, which nobody takes down.
te_status te_get_registration_cost(te_engine *engine,
                                   const void *addr,
                                   te_registration_cost *cost,
                                   te_device_cost *devices,
                                   size_t device_size,
                                   size_t capacity);

/// Describes the registered ranges of this engine in `regions`, in the order in which they were registered.
///
/// `regions` is an array of `capacity` elements of `region_size` bytes, sizeof(te_memory_region); it may be
/// NULL if `capacity` is 0. `count` receives how many ranges there are, which may be more than `capacity`;
/// the first `capacity` are described then.
te_status te_list_local_memory(te_engine *engine,
                               te_memory_region *regions,
                               size_t region_size,
                               size_t capacity,
                               size_t *count);

// ----------------------------------------------------------------------------------------------------
// Segments
//
// A segment is the registered memory of one engine. Transfers name it by a number, which is valid in the
// engine that opened it, for as long as that engine lives (or te_forget_segment is called for it). The
// engine keeps what it knows of a segment, and looks anew by itself when a transfer fails because the peer
// has changed or was started again.

/// A segment.
typedef uint64_t te_segment;

/// The segment of the engine itself, which needs no opening.
#define TE_LOCAL_SEGMENT 0

/// Opens the segment of the engine that is called `name`: te_engine_address of the peer, or its `server_name`
/// where there is a metadata server. Gives the same number when it is open already.
///
/// Asks the peer, or the metadata server, and blocks for up to some seconds; for a minute if the peer takes
/// the connection and then says nothing, as a stopped process does. te_engine_destroy ends the wait. Leading
/// '/' are not part of a name. Errors: TE_ERR_INVALID_ARGUMENT for an empty name; TE_ERR_DNS and
/// TE_ERR_SOCKET if the peer cannot be reached; TE_ERR_METADATA if there is no such segment;
/// TE_ERR_MALFORMED_JSON.
te_status te_open_segment(te_engine *engine, const char *name, te_segment *segment);

/// Says that the program is done with a segment. What is known of it and the connections to the peer are
/// kept, since the number may be in use elsewhere in the program and stays valid; it costs nothing not to
/// call this.
te_status te_close_segment(te_engine *engine, te_segment segment);

/// Asks the peer, or the metadata server, for the present state of a segment. On failure the former state is
/// kept.
///
/// Blocks as long as te_open_segment, with the same errors.
te_status te_refresh_segment(te_engine *engine, te_segment segment);

/// Describes the registered ranges of a segment in `regions`, in the order in which the peer registered them,
/// as far as is known here: te_refresh_segment first, if it matters.
///
/// `regions` is an array of `capacity` elements of `region_size` bytes, sizeof(te_memory_region); it may be
/// NULL if `capacity` is 0. `count` receives how many ranges there are, which may be more than `capacity`;
/// the first `capacity` are described then.
te_status te_list_segment_memory(te_engine *engine,
                                 te_segment segment,
                                 te_memory_region *regions,
                                 size_t region_size,
                                 size_t capacity,
                                 size_t *count);

/// Asks the peer whether it is alive: 0 if it answers. Blocks as long as te_open_segment.
///
/// Errors: TE_ERR_DNS, TE_ERR_SOCKET, and TE_ERR_MALFORMED_JSON if something else answers there.
te_status te_probe_segment(te_engine *engine, te_segment segment);

/// Asks the engine that is called `name` whether it is alive, as te_probe_segment; its segment need not be open.
te_status te_probe(te_engine *engine,
                   const char *name);

/// Forgets what is known here of the segment of that name. Its number becomes invalid, connections to the
/// peer are closed when they are idle, and opening it again asks the peer and gives another number. A name
/// that is not open is no error.
te_status te_forget_segment(te_engine *engine, const char *name);

/// Gives the descriptor of a segment in JSON: what the peer tells of itself, as it is kept at metadata
/// servers. TE_LOCAL_SEGMENT gives what peers are told of this engine.
///
/// As far as it is known here, or, with `refresh` other than 0, after asking as te_refresh_segment does, with
/// its errors. `json` receives a text that the caller frees with te_free_text: an object with "name",
/// "protocol", "buffers" in the peer's order of registration, each with "addr" and "length", and so on.
/// Errors: TE_ERR_METADATA for TE_LOCAL_SEGMENT as long as no transport is installed.
te_status te_segment_json(te_engine *engine, te_segment segment, int refresh, char **json);

// ----------------------------------------------------------------------------------------------------
// Transfers
//
// A request moves bytes between a contiguous range of this process, which need not be registered, and one of
// a segment, which must be, and may reach across ranges that touch. Requests run at the same time and end in
// any order. Each ends in one of the final states, which never changes; it always ends, since an engine
// gives up a transfer that makes no progress. No memory of a request is touched after its end, whatever its
// state.

/// Which way the bytes go.
typedef enum te_opcode {
    /// From the segment into local memory.
    TE_READ = 0,
    /// From local memory into the segment.
    TE_WRITE = 1,
} te_opcode;

/// State of a request or a batch. CANCELED, COMPLETED, TIMEOUT and FAILED are final.
typedef enum te_state {
    /// Under way.
    TE_STATE_WAITING = 0,
    /// Under way; not used at present.
    TE_STATE_PENDING = 1,
    /// Not used at present.
    TE_STATE_INVALID = 2,
    /// Ended by te_batch_cancel, by unregistering its memory, or by destroying the engine.
    TE_STATE_CANCELED = 3,
    /// All bytes are in place: in the peer's memory (TE_WRITE), or in the local range (TE_READ).
    TE_STATE_COMPLETED = 4,
    /// Given up after one of the times of te_transfer_options.
    TE_STATE_TIMEOUT = 5,
    /// Failed. Any part of the target range may have been written.
    TE_STATE_FAILED = 6,
} te_state;

/// One transfer.
typedef struct te_transfer_request {
    /// A te_opcode.
    uint32_t opcode;
    /// Zero.
    uint32_t reserved;
    /// First byte of the local range. The memory is the engine's until the transfer is over: it is read
    /// (TE_WRITE) or written (TE_READ).
    void *local;
    /// The segment of the other range. TE_LOCAL_SEGMENT is this engine's own.
    te_segment segment;
    /// First byte of the other range, in the address space of its process.
    uint64_t remote_addr;
    /// Length of both ranges in bytes. 0 completes at once.
    uint64_t length;
    /// How often the program has tried this transfer before; 0: it has not. Over RDMA each number takes
    /// another pair of NICs than the one before, as far as there are some, instead of the next preferred one.
    /// Tries that the engine makes by itself come on top. Other transports have no use for it.
    uint32_t retry_hint;
    /// Has no effect at present: which transport to prefer.
    uint32_t transport_hint;
    /// Requests of one batch with the same number other than 0 go the same way one after the other, in the
    /// order in which they were submitted: over the same connection with TCP, over the same queue pair with
    /// RDMA, which moves a long one by one pair of NICs then, as long as both memories are in one place of
    /// their machines and the NICs that serve those stay. What fails there and is tried again goes anywhere,
    /// and so does what follows on a connection that is given up. 0: any way.
    uint64_t group;
} te_transfer_request;

/// Options of a set of requests that are submitted together.
typedef struct te_transfer_options {
    /// sizeof(te_transfer_options).
    size_t struct_size;
    /// Requests that are not over after this time end as TE_STATE_TIMEOUT, in milliseconds since the call. 0:
    /// no such limit.
    int64_t timeout_ms;
    /// A request whose connection moves nothing for this time ends as TE_STATE_TIMEOUT, in milliseconds. 0:
    /// as MC_SLICE_TIMEOUT says, or 30 s.
    int64_t stall_timeout_ms;
    /// With notify_message: a notification for the engine of the first request's segment. It is sent when all
    /// requests have completed, so the peer finds the bytes in place, and not at all if one fails. NULL for
    /// none.
    const char *notify_name;
    /// Set exactly when notify_name is.
    const char *notify_message;
} te_transfer_options;

/// What has become of a request.
typedef struct te_transfer_result {
    /// sizeof(te_transfer_result). Functions that fill arrays set it.
    size_t struct_size;
    /// A te_state.
    int32_t state;
    /// Why it ended as it did; 0 unless the state is CANCELED, TIMEOUT or FAILED.
    te_status error;
    /// Bytes that are known to have moved; never more than the request's length, and all of them when it has
    /// completed.
    uint64_t bytes;
} te_transfer_result;

/// Runs `count` requests and returns when all are over.
///
/// `requests` is an array with elements of `request_size` bytes, sizeof(te_transfer_request); `options` may
/// be NULL. `results` is an array of `count` elements of `result_size` bytes, sizeof(te_transfer_result), or
/// NULL (`result_size` is ignored then).
///
/// Returns 0 if all requests have completed, else the error of the first that has not, and te_last_error() is
/// its text. In both cases all results are written. If the call is refused as a whole, nothing is started and
/// no result is written: TE_ERR_INVALID_ARGUMENT for a bad argument, such as an unknown opcode, or a local
/// range that is NULL but not empty or that runs past the end of the address space; TE_ERR_INVALID_HANDLE for
/// an unknown segment; TE_ERR_NOT_SUPPORTED_TRANSPORT. What is wrong with the range of the peer fails its
/// request only.
///
/// If all requests have completed but the notification could not be sent, its error is returned.
te_status te_batch_transfer(te_engine *engine,
                            const te_transfer_request *requests,
                            size_t request_size,
                            size_t count,
                            const te_transfer_options *options,
                            te_transfer_result *results,
                            size_t result_size);

// ----------------------------------------------------------------------------------------------------
// Batches
//
// A batch runs requests while the program goes on: submit, then poll, wait, or watch a file descriptor. The
// requests of a batch are numbered from 0, in the order in which they were submitted.

/// A batch. Its number is valid in the engine that created it.
typedef uint64_t te_batch;

/// What has become of a batch.
typedef struct te_batch_status {
    /// sizeof(te_batch_status).
    size_t struct_size;
    /// A te_state: TE_STATE_WAITING while a request is under way; TE_STATE_COMPLETED when all have completed,
    /// also if there are none; else how the requests that have not completed ended: FAILED if one did, else
    /// TIMEOUT if one did, else CANCELED.
    int32_t state;
    /// Zero.
    uint32_t reserved;
    /// Bytes that are known to have moved.
    uint64_t bytes;
    /// Requests that were submitted.
    uint64_t tasks;
    /// Requests that are over.
    uint64_t finished;
    /// Requests that are over and have not completed.
    uint64_t failed;
} te_batch_status;

/// Creates a batch with room for `capacity` requests. Free it with te_batch_free.
///
/// Errors: TE_ERR_MEMORY.
te_status te_batch_create(te_engine *engine, size_t capacity, te_batch *batch);

/// Starts `count` requests and returns without waiting for them. They take the next numbers in the batch.
///
/// `requests` is an array with elements of `request_size` bytes, sizeof(te_transfer_request); it may be
/// reused after the call, but the memory that it names belongs to the engine until each request is over.
/// `options` may be NULL. May be called again until the batch is full or cancelled, also while earlier requests
/// run.
///
/// On failure nothing is started: TE_ERR_TOO_MANY_REQUESTS if the batch has not that much room, TE_ERR_CANCELED
/// if it was cancelled, else as for te_batch_transfer. Requests that fail after that tell so by their own status. A notification that cannot
/// be sent is told in the log only.
te_status te_batch_submit(te_engine *engine,
                          te_batch batch,
                          const te_transfer_request *requests,
                          size_t request_size,
                          size_t count,
                          const te_transfer_options *options);

/// Tells what has become of request number `task` of a batch. Never blocks.
///
/// Set `result->struct_size` before the call. Errors: TE_ERR_INVALID_ARGUMENT if the batch has no such
/// request.
te_status te_batch_task_status(te_engine *engine, te_batch batch, size_t task, te_transfer_result *result);

/// Writes the text of the error of request number `task` into `buffer` of `size` bytes, with a NUL at its
/// end; "" if it has none. A text that does not fit is cut.
te_status te_batch_task_error(te_engine *engine, te_batch batch, size_t task, char *buffer, size_t size);

/// Tells what has become of a batch. Never blocks.
///
/// Set `status->struct_size` before the call.
te_status te_batch_poll(te_engine *engine, te_batch batch, te_batch_status *status);

/// Waits until all requests of a batch are over, for up to `timeout_ms` milliseconds; a negative number waits
/// for as long as it takes.
///
/// Returns 0 when all are over, however they ended. TE_ERR_TIMEOUT if a request still runs: nothing is
/// cancelled, and the call can be repeated. `status` may be NULL; else set `status->struct_size` before the
/// call.
te_status te_batch_wait(te_engine *engine,
                        te_batch batch,
                        int64_t timeout_ms,
                        te_batch_status *status);

/// Asks for the end of all requests of a batch that are under way. They end within a fraction of a second, as
/// TE_STATE_CANCELED unless they were over before; te_batch_wait waits for that. Then the engine does not touch
/// local memory for them any more; bytes of a WRITE that were sent before may still arrive at the peer a little
/// later, as after TE_STATE_TIMEOUT. The batch takes no more requests: free it.
te_status te_batch_cancel(te_engine *engine,
                          te_batch batch);

/// Gives a file descriptor for poll() and the like. It becomes readable each time that no request of the
/// batch is under way any more, not before the first submit; read its 8 bytes before the next submit. It does
/// not block, and is closed by exec.
///
/// The descriptor belongs to the batch, which closes it when it is freed. Errors: TE_ERR_LIMIT if there are
/// too many open files.
te_status te_batch_event_fd(te_engine *engine, te_batch batch, int *fd);

/// Frees a batch. A notification that is still to be sent is sent nevertheless.
///
/// Errors: TE_ERR_BATCH_BUSY while a request is under way; the batch stays as it is.
te_status te_batch_free(te_engine *engine, te_batch batch);

// ----------------------------------------------------------------------------------------------------
// Pools
//
// A pool lends registered memory for a moment, for payloads that live too short to be worth a registration of
// their own: copy the bytes into a lease, transfer from there, release the lease; or transfer into a lease and
// copy them out. The memory is registered once, for transfers of its engine: peers cannot reach it. Over TCP
// memory need not be registered at all, and there is little to gain from a pool.
//
//     te_pool *pool;
//     te_pool_lease lease = {.struct_size = sizeof lease, .direction = TE_POOL_PUT};
//
//     te_pool_create(engine, NULL, &pool);
//     te_pool_acquire(pool, length, 100, &lease);
//     memcpy(lease.addr, payload, length);
//
//     te_transfer_request request = {
//         .opcode = TE_WRITE, .local = lease.addr, .segment = peer, .remote_addr = remote_addr, .length = length};
//     te_batch_transfer(engine, &request, sizeof request, 1, NULL, NULL, 0);
//
//     te_pool_release(pool, lease.id, TE_POOL_OVER, 0);
//     te_pool_close(pool, 1000);
//
// te_put and te_get do all of that for many ranges in one call, by the way that suits each of them; te_get_leased hands the
// lease out.
//
//     te_pool_item item = {payload, length, peer, remote_addr};
//
//     te_put(engine, pool, &item, sizeof item, 1, NULL, NULL, 0);
//
// Who waits for a lease is served in the order of arrival. Puts and gets share the memory, but a part of it is
// kept for either: however many leases puts have, gets can go on, and the other way round. Acquiring and
// releasing a lease take some hundred nanoseconds and no system call, unless a thread waits.

/// A lease that is neither for a put nor for a get. It is taken from what is kept for neither.
#define TE_POOL_ANY 0

/// A lease for bytes that go to a peer.
#define TE_POOL_PUT 1

/// A lease for bytes that come from a peer.
#define TE_POOL_GET 2

/// All transfers that used the lease are over.
#define TE_POOL_OVER 0

/// Transfers of a batch may still use the lease, for instance after te_batch_wait has timed out.
#define TE_POOL_UNKNOWN 1

/// No bytes are kept for the direction.
#define TE_POOL_NO_RESERVE UINT64_MAX

/// While a pool has no room, te_put and te_get register the memory of what they would stage, and transfer it from there.
#define TE_POOL_REGISTER 0

/// They wait until there is room.
#define TE_POOL_WAIT 1

/// They give up what they would stage, as TE_STATE_TIMEOUT.
#define TE_POOL_FAIL 2

/// te_put and te_get choose the way of each item.
#define TE_POOL_AUTO 0

/// Whatever can be staged is staged, unless its memory is registered.
#define TE_POOL_STAGED 1

/// Nothing is staged.
#define TE_POOL_DIRECT 2

/// A pool.
typedef struct te_pool te_pool;

/// How te_pool_create makes a pool.
typedef struct te_pool_options {
    /// sizeof(te_pool_options).
    size_t struct_size;
    /// The memory to lend out: `bytes` at `arena`, aligned to `alignment`, and not registered yet. It is the pool's
    /// until te_pool_close has returned 0, or te_engine_destroy has returned. NULL: the pool maps memory itself, in
    /// large pages where there are some, and unmaps it at its end.
    void *arena;
    /// How many bytes it lends at most at a time. 0: 64 MiB; it must be given with `arena`.
    uint64_t bytes;
    /// Where the memory is: "cpu:0" for a NUMA node, "*" or NULL for any. Memory that the pool maps is taken from
    /// that node for as long as it has some. Memory of devices cannot be lent.
    const char *location;
    /// How many threads put and get at a time, from which the defaults below follow. 0: 4.
    uint32_t workers;
    /// How many leases it lends at most at a time, up to 65536. 0: 1024.
    uint32_t most_leases;
    /// Leases begin at multiples of it and are charged with multiples of it, in bytes: a power of two up to 4096. 0: 256.
    uint64_t alignment;
    /// Bytes of the largest lease. 0: `bytes` / (2 x `workers`).
    uint64_t largest_lease;
    /// Bytes that are kept for TE_POOL_PUT, so that gets cannot starve puts, and leases likewise in proportion. What
    /// is left by both reserves must be as large as the largest lease. 0: `bytes` / (2 x `workers`), or less if more does not fit.
    /// TE_POOL_NO_RESERVE: none.
    uint64_t put_reserve;
    /// The same for TE_POOL_GET, so that puts cannot starve gets.
    uint64_t get_reserve;
    /// What te_put and te_get do while there is no room: TE_POOL_REGISTER, TE_POOL_WAIT or TE_POOL_FAIL. The first
    /// time that something is registered for this reason is logged, and all are counted in te_pool_statistics.
    uint32_t fallback;
    /// Zero.
    uint32_t reserved;
} te_pool_options;

/// Memory that a pool has lent.
typedef struct te_pool_lease {
    /// sizeof(te_pool_lease).
    size_t struct_size;
    /// Set before te_pool_acquire: TE_POOL_PUT, TE_POOL_GET or TE_POOL_ANY.
    uint32_t direction;
    /// Zero.
    uint32_t reserved;
    /// The number to release it by. No other lease ever has it.
    uint64_t id;
    /// Its first byte.
    void *addr;
    /// Its length in bytes, as it was asked for.
    uint64_t length;
} te_pool_lease;

/// What a pool is, has, and has done. Bytes of leases are rounded up to the alignment.
typedef struct te_pool_statistics {
    /// sizeof(te_pool_statistics).
    size_t struct_size;
    /// First byte of the memory that it lends.
    void *arena;
    /// Bytes of that memory, as it is registered: whole pages where the pool has mapped it.
    uint64_t bytes;
    /// Bytes of the pages that it has mapped; 0 for memory of the caller.
    uint64_t page_bytes;
    /// As in te_pool_options, with the defaults filled in; so are the next three.
    uint64_t alignment;
    /// Bytes of the largest lease.
    uint64_t largest_lease;
    /// Bytes that are kept for TE_POOL_PUT; 0: none.
    uint64_t put_reserve;
    /// Bytes that are kept for TE_POOL_GET; 0: none.
    uint64_t get_reserve;
    /// Leases that are out or quarantined.
    uint64_t leases;
    /// Their bytes.
    uint64_t leased_bytes;
    /// The most bytes that were leased at a time.
    uint64_t most_leased_bytes;
    /// Leases that are quarantined: released, and out of use until their batches are over.
    uint64_t quarantined;
    /// Threads that wait for a lease.
    uint64_t waiting;
    /// Bytes of the longest lease that there is room for in some direction, up to the largest lease.
    uint64_t longest_free;
    /// Leases that were granted.
    uint64_t acquired;
    /// How often te_pool_acquire, te_put or a get had to wait for a lease.
    uint64_t waited;
    /// How often they found no room within their time. Puts and gets look without waiting first.
    uint64_t refused;
    /// Leases that were ever quarantined.
    uint64_t ever_quarantined;
    /// Calls of te_put.
    uint64_t puts;
    /// Calls of te_get and te_get_leased.
    uint64_t gets;
    /// Items that were transferred from or to memory that was registered.
    uint64_t items_zero_copy;
    /// Items that were transferred from or to where they are, after their memory was registered for the call, or without that where
    /// it need not be.
    uint64_t items_direct;
    /// Items that went through a lease.
    uint64_t items_staged;
    /// Their bytes.
    uint64_t bytes_staged;
    /// Ranges that were registered for te_put and te_get.
    uint64_t registrations;
    /// Groups of items that were registered instead of staged, because there was no room.
    uint64_t fallbacks;
    /// Items that were transferred again after a failure, counted each time; of long ones each part that was.
    uint64_t retried;
} te_pool_statistics;

/// An item of te_put, te_get or te_get_leased.
typedef struct te_pool_item {
    /// First byte of the local range, which need not be registered. NULL for te_get_leased.
    void *local;
    /// Length of both ranges in bytes. 0 completes at once.
    uint64_t length;
    /// The segment of the other range.
    te_segment segment;
    /// First byte of the other range, in the address space of its process.
    uint64_t remote_addr;
} te_pool_item;

/// Options of te_put, te_get and te_get_leased.
typedef struct te_pool_transfer_options {
    /// sizeof(te_pool_transfer_options).
    size_t struct_size;
    /// TE_POOL_AUTO, TE_POOL_STAGED or TE_POOL_DIRECT. te_get_leased ignores it.
    uint32_t path;
    /// How many times an item is transferred again that has failed. What ended because of `timeout_ms`, or was canceled, is not.
    uint32_t retries;
    /// How long to wait before that, in milliseconds.
    uint32_t retry_pause_ms;
    /// Zero.
    uint32_t reserved;
    /// Limit of the whole call, in milliseconds: items that are not over by then end as TE_STATE_TIMEOUT. 0: no such limit.
    int64_t timeout_ms;
} te_pool_transfer_options;

/// Creates a pool and registers its memory, for transfers of this engine. Free it with te_pool_close.
///
/// `options` may be NULL. te_engine_destroy closes the pools of the engine, whatever they have lent: when it has
/// returned, memory that they have mapped is gone, and calls on them give TE_ERR_INVALID_HANDLE. Errors:
/// TE_ERR_INVALID_ARGUMENT for options that are out of range or contradict each other; TE_ERR_DEVICE_NOT_FOUND if there is no
/// such NUMA node; TE_ERR_MEMORY if the memory cannot be mapped; else as for te_register_local_memory.
te_status te_pool_create(te_engine *engine,
                         const te_pool_options *options,
                         te_pool **pool);

/// Borrows `bytes` of memory, until te_pool_release. What is in it is what was there before.
///
/// Set `lease->struct_size` and `lease->direction` before the call. While there is no room it waits, for up to `timeout_ms`
/// milliseconds: 0 does not wait, and a negative number waits for as long as it takes. Errors:
/// TE_ERR_INVALID_ARGUMENT for 0 bytes, or more than the largest lease; TE_ERR_TIMEOUT if there was no room within
/// the time, or others wait already; TE_ERR_CANCELED while the pool is being closed; TE_ERR_INVALID_HANDLE if it was closed, or its
/// engine destroyed, also while the call was waiting.
te_status te_pool_acquire(te_pool *pool,
                          uint64_t bytes,
                          int64_t timeout_ms,
                          te_pool_lease *lease);

/// Gives a lease back. The caller does not use its memory any more.
///
/// `outcome` is TE_POOL_OVER if no transfer uses it any more; `batch` is ignored then. With TE_POOL_UNKNOWN it is
/// quarantined, that is, not lent again until no request of `batch`, of the pool's engine, is under way, and nothing more is to be
/// done about it. A batch can be freed only when it is over, so with one that was freed the outcome is TE_POOL_OVER. Never
/// waits. Errors: TE_ERR_INVALID_HANDLE if the pool has not lent `lease`, which was released already or is of another
/// pool, or there is no such batch; nothing has changed then.
te_status te_pool_release(te_pool *pool,
                          uint64_t lease,
                          uint32_t outcome,
                          te_batch batch);

/// Closes a pool: unregisters its memory, and unmaps it if the pool has mapped it.
///
/// Waits until all leases are released, and quarantined ones free, for up to `timeout_ms` milliseconds: 0 does not wait,
/// and a negative number waits for as long as it takes. While it waits, calls of te_pool_acquire give
/// TE_ERR_CANCELED, also those that were waiting; so do te_put and te_get, and their items that have not been staged yet.
/// Errors: TE_ERR_BATCH_BUSY if leases are still out, a te_put or te_get has not returned, or the pool
/// is being closed by another call: it is open as before. The same if a transfer that uses its memory without
/// a lease did not end within five seconds: then the memory takes no new transfers, and the call can be repeated. What a
/// device answers that does not give the memory back: the pool is closed then, and its memory stays mapped.
te_status te_pool_close(te_pool *pool,
                        int64_t timeout_ms);

/// Tells what a pool is, has, and has done. Set `statistics->struct_size` before the call.
te_status te_pool_stats(te_pool *pool, te_pool_statistics *statistics);

/// Gives the system back the memory of a pool that is not lent; it is taken anew when it is. What is lent is not
/// touched, and calls of te_pool_acquire meanwhile may find less room than there is.
///
/// `bytes` receives how much is not lent and was given back, whether it took memory or had not been used yet; it may
/// be NULL. It is 0 where a device has registered the memory, as with RDMA, since devices keep the memory that they
/// know; and for memory of the caller.
te_status te_pool_trim(te_pool *pool,
                       uint64_t *bytes);

/// Writes `count` items into their segments, and returns when all are over.
///
/// The local ranges need not be registered. For each item the engine chooses the best way: from where it is, if it is
/// registered or the segment is reached by a transport that needs no registration (TCP, and the engine itself);
/// registered for the call, if it is memory of a device or longer than the largest lease; else through a lease of the pool or
/// registered for the call, whichever has taken less time lately. Ranges that overlap or touch are registered once, and
/// unregistered before the call returns, which waits for other calls that use the same bytes; while they are registered,
/// te_register_local_memory refuses them with TE_ERR_ADDRESS_OVERLAPPED. Of items whose ranges in the same segment overlap
/// the last one wins.
///
/// `items` is an array with elements of `item_size` bytes, sizeof(te_pool_item); `options` may be NULL. `results` is an
/// array of `count` elements of `result_size` bytes, sizeof(te_transfer_result), or NULL (`result_size` is
/// ignored then).
///
/// Returns 0 if all items have completed, else the error of the first that has not, and te_last_error() is its text. In both
/// cases all results are written. Memory of the caller is not touched any more then. What uses a lease may be under way when
/// `timeout_ms` has passed: its lease is quarantined until it is over. If the call is refused as a whole, nothing is
/// started and no result is written: TE_ERR_INVALID_ARGUMENT for a bad argument, or a pool of another engine;
/// TE_ERR_INVALID_HANDLE for an unknown segment, or a pool that was closed; TE_ERR_CANCELED for one that is being closed;
/// TE_ERR_NOT_SUPPORTED_TRANSPORT.
///
/// If all items have completed but memory that was registered for the call could not be unregistered, that error is
/// returned; the memory stays blocked. It is TE_ERR_BATCH_BUSY if another call still used the memory when `timeout_ms` had passed, and
/// five seconds: then it stays registered until that call returns.
te_status te_put(te_engine *engine,
                 te_pool *pool,
                 const te_pool_item *items,
                 size_t item_size,
                 size_t count,
                 const te_pool_transfer_options *options,
                 te_transfer_result *results,
                 size_t result_size);

/// Reads `count` items from their segments into local ranges, as te_put writes them; of items whose local ranges overlap the
/// last one wins. A local range is not touched before its item has arrived if that is staged.
te_status te_get(te_engine *engine,
                 te_pool *pool,
                 const te_pool_item *items,
                 size_t item_size,
                 size_t count,
                 const te_pool_transfer_options *options,
                 te_transfer_result *results,
                 size_t result_size);

/// Reads `count` items from their segments into one lease of the pool, and hands it out: item i begins at
/// `lease->addr` plus the lengths of the items before it. `local` of each item is NULL. Nothing is copied.
///
/// Set `lease->struct_size` before the call. If all items have completed, the lease is written; the caller gives it back by
/// te_pool_release. Otherwise the call gives it back, and results are written, and errors are, as of te_put. The lease is for
/// TE_POOL_GET; while there is no room, the call waits for it if the pool's fallback is TE_POOL_WAIT, and is refused with
/// TE_ERR_TIMEOUT otherwise. TE_ERR_INVALID_ARGUMENT for 0 bytes in all, or more than the largest lease.
te_status te_get_leased(te_engine *engine,
                        te_pool *pool,
                        const te_pool_item *items,
                        size_t item_size,
                        size_t count,
                        const te_pool_transfer_options *options,
                        te_pool_lease *lease,
                        te_transfer_result *results,
                        size_t result_size);

// ----------------------------------------------------------------------------------------------------
// Notifications
//
// Short messages between engines: a name and a text. te_transfer_options can send one after a transfer.

/// A message.
typedef struct te_notification {
    /// What it is about, as its sender chose.
    char *name;
    /// The text.
    char *message;
} te_notification;

/// Sends a message to the engine of a segment, and returns when it has arrived there. Blocks as long as
/// te_open_segment.
///
/// Errors: TE_ERR_DNS and TE_ERR_SOCKET if the peer cannot be reached; TE_ERR_METADATA if it refuses. After a
/// failure of the connection it is not known whether the message arrived; it never arrives twice.
te_status te_notify(te_engine *engine, te_segment segment, const char *name, const char *message);

/// Sends a message to the engine that is called `peer`, as te_notify; its segment need not be open.
te_status te_notify_name(te_engine *engine, const char *peer, const char *name, const char *message);

/// Takes all messages that have arrived at this engine, in the order of their arrival. Never blocks.
///
/// `list` receives an array of `count` messages, which the caller frees with te_free_notifications, or NULL
/// if there are none. Errors: TE_ERR_MEMORY; the messages are lost then.
te_status te_take_notifications(te_engine *engine, te_notification **list, size_t *count);

/// Frees what te_take_notifications gave. (NULL, 0) is fine.
void te_free_notifications(te_notification *list, size_t count);

// ----------------------------------------------------------------------------------------------------
// Statistics
//
// Numbers since the engine was created. Each is exact, but they are not read at one instant.

/// What an engine has counted.
typedef struct te_statistics {
    /// sizeof(te_statistics).
    size_t struct_size;
    /// Ranges of memory that are registered now, being registered or unregistered, or blocked because a device keeps them.
    uint64_t regions_live;
    /// Ranges that were registered.
    uint64_t regions_registered;
    /// Ranges that were unregistered.
    uint64_t regions_unregistered;
    /// Registrations that failed.
    uint64_t registrations_refused;
    /// Batches that were created.
    uint64_t batches_allocated;
    /// Batches that were freed.
    uint64_t batches_freed;
    /// Requests that were submitted.
    uint64_t tasks_submitted;
    /// Requests that ended as TE_STATE_COMPLETED.
    uint64_t tasks_completed;
    /// Requests that ended as TE_STATE_FAILED.
    uint64_t tasks_failed;
    /// Requests that ended as TE_STATE_TIMEOUT.
    uint64_t tasks_timed_out;
    /// Requests that ended as TE_STATE_CANCELED.
    uint64_t tasks_cancelled;
    /// Bytes that requests of this engine have read from segments.
    uint64_t bytes_read;
    /// Bytes that requests of this engine have written to segments.
    uint64_t bytes_written;
    /// Requests of peers that were served.
    uint64_t requests_served;
    /// Requests of peers that were refused, for instance because the memory is not registered.
    uint64_t requests_refused;
    /// Bytes that were moved for peers.
    uint64_t bytes_served;
    /// Connections that were made to peers.
    uint64_t connections_opened;
    /// Connections that were accepted from peers.
    uint64_t connections_accepted;
    /// Connections to peers that could not be made or broke.
    uint64_t connections_failed;
    /// Descriptors of segments that were asked for.
    uint64_t descriptor_fetches;
    /// Messages that were sent.
    uint64_t notifications_sent;
    /// Messages that have arrived.
    uint64_t notifications_received;
    /// Nanoseconds that registering with devices has spent on finding out which pages are there.
    uint64_t registration_residency_ns;
    /// Nanoseconds that it has spent on having the kernel provide absent pages.
    uint64_t registration_population_ns;
    /// Nanoseconds from the first to the last call of a device, added up over registrations.
    uint64_t registration_pinning_ns;
    /// Nanoseconds that registrations have waited for a metadata server to be told.
    uint64_t registration_publishing_ns;
    /// Nanoseconds that it has spent on everything else.
    uint64_t registration_book_keeping_ns;
    /// Nanoseconds from the first to the last call of a device, added up over unregistrations.
    uint64_t deregistration_ns;
    /// Parts of requests that were tried again, on another connection or NIC or with a fresh descriptor.
    uint64_t retries;
} te_statistics;

/// What a NIC is doing.
typedef struct te_nic_load {
    /// sizeof(te_nic_load). Functions that fill arrays set it.
    size_t struct_size;
    /// Bytes of work that it has been given and that has not ended.
    uint64_t bytes_in_flight;
    /// Bytes a second that it has moved lately, averaged while it had work; 0 if it never had.
    double bytes_per_second;
    /// The NIC, such as "mlx5_0", with a NUL at its end; longer names are cut.
    char name[64];
} te_nic_load;

/// Tells what the engine has counted. Set `statistics->struct_size` before the call.
te_status te_get_statistics(te_engine *engine, te_statistics *statistics);

/// Tells what each NIC of an engine is doing; there are none without RDMA.
///
/// `loads` is an array of `capacity` elements of `load_size` bytes, sizeof(te_nic_load); it may be NULL if
/// `capacity` is 0. `count` receives how many NICs there are, which may be more than `capacity`; the first
/// `capacity` are described then.
te_status te_nic_loads(te_engine *engine,
                       te_nic_load *loads,
                       size_t load_size,
                       size_t capacity,
                       size_t *count);

/// All numbers of an engine in the text format of Prometheus, version 0.0.4: those of te_statistics, histograms of latencies, and
/// what NICs and pools have done.
///
/// `text` receives a text that the caller frees with te_free_text. Waits while a transport is being installed.
te_status te_metrics(te_engine *engine,
                     char **text);

/// Opens a unix socket at which te_metrics can be read, until the engine is destroyed: by
/// `curl --unix-socket PATH http://te/metrics`, by a scraper, or by `te info --watch`. Nothing is opened without this call or
/// TE_METRICS_DIRECTORY in the environment.
///
/// `path` is where; a socket that a dead process has left there is replaced. NULL:
/// "transfer-engine-PID-NUMBER.sock", where `te info --watch PID` finds it, in TE_METRICS_DIRECTORY, or in
/// "/tmp/transfer-engine-UID" if that is not set. Such a directory is made if need be, and must belong to this
/// user, or root, and be writable to nobody else. An engine has one socket: a later call with another path moves it.
///
/// The socket has mode 0600; other users than this one and root are not answered. A thread of its own serves
/// it, which sleeps between requests. In a child made by fork() it is not served. Errors: TE_ERR_INVALID_ARGUMENT
/// for a path of more than 107 bytes or a directory that others may write to; TE_ERR_SOCKET if something is at
/// the path, or it cannot be used; TE_ERR_LIMIT.
te_status te_serve_metrics(te_engine *engine,
                           const char *path);

// ----------------------------------------------------------------------------------------------------
// Metadata servers
//
// A metadata server keeps texts under keys; engines look after what they keep there by themselves. These
// functions are for programs that look for or clean up what is there, with or without an engine. Keys and
// values are used as they are: engines put "mooncake/" and MC_METADATA_CLUSTER_ID before theirs.
//
// Each call ends within five seconds, whatever the server does.

/// A metadata server that is in use.
typedef struct te_store te_store;

/// Makes a metadata server ready for use. Free it with te_store_close. Asks nobody: a server that is away
/// shows at the first call.
///
/// `uri` is as in te_engine_options. Errors: TE_ERR_NOT_IMPLEMENTED for an unknown kind of server;
/// TE_ERR_INVALID_ARGUMENT for what names none, such as "P2PHANDSHAKE".
te_status te_store_open(const char *uri, te_store **store);

/// Closes a metadata server: its connections end, and calls on it give TE_ERR_INVALID_HANDLE. Waits for those
/// that are under way. NULL is fine and does nothing.
te_status te_store_close(te_store *store);

/// Asks for the text under a key. `value` receives a text that the caller frees with te_free_text, or NULL if
/// there is none under the key.
///
/// Errors: TE_ERR_METADATA if the server cannot be asked.
te_status te_store_get(te_store *store, const char *key, char **value);

/// Puts a text under a key, in place of what was there. Servers of Mooncake expect JSON. Line breaks at the
/// end may be left out.
///
/// Errors: TE_ERR_METADATA; then it is not known whether it was put there.
te_status te_store_put(te_store *store, const char *key, const char *value);

/// Removes what is under a key. That there is nothing is no error.
///
/// Errors: TE_ERR_METADATA; then it is not known whether it was removed.
te_status te_store_remove(te_store *store, const char *key);

// ----------------------------------------------------------------------------------------------------
// Configuration
//
// What the environment variables MC_* and TE_* say. An engine takes it down when it is created;
// docs/configuration.md has them all.

/// The configuration. Each field is as the variable named says, or its default.
typedef struct te_configuration {
    /// sizeof(te_configuration).
    size_t struct_size;
    /// MC_MAX_MR_SIZE: longest piece of memory that is registered with a NIC at once, in bytes.
    uint64_t max_mr_size;
    /// MC_SLICE_SIZE: bytes of a slice.
    uint64_t slice_size;
    /// A slice takes the remainder of a request if it is longer by at most as many bytes: see MC_FRAGMENT_RATIO.
    uint64_t fragment_limit;
    /// MC_HANDSHAKE_MAX_LENGTH: longest request that the handshake channel accepts, in bytes.
    uint64_t handshake_max_length;
    /// MC_TE_METADATA_REFRESH_INTERVAL_SECONDS; 0: never.
    uint64_t metadata_refresh_interval_s;
    /// MC_SLICE_TIMEOUT in seconds; 0: it is not set.
    uint64_t slice_timeout_s;
    /// MC_HANDSHAKE_PORT: port of a peer whose name has none.
    uint32_t handshake_port;
    /// MC_HANDSHAKE_LISTEN_BACKLOG.
    uint32_t handshake_backlog;
    /// MC_HANDSHAKE_CONNECT_TIMEOUT in seconds.
    uint32_t handshake_connect_timeout_s;
    /// MC_MIN_RPC_PORT: lowest port that is drawn.
    uint32_t min_rpc_port;
    /// MC_MAX_RPC_PORT: highest port that is drawn.
    uint32_t max_rpc_port;
    /// MC_USE_IPV6: 1 if it is set, else 0.
    uint32_t use_ipv6;
    /// 1 if descriptors of peers are kept, 0 if MC_DISABLE_METACACHE is set.
    uint32_t metadata_cache;
    /// MC_LOG_LEVEL: a te_log_level.
    uint32_t log_level;
    /// MC_ENABLE_PARALLEL_REG_MR: 1, 0, or -1 for as it is faster.
    int32_t parallel_registration;
    /// MC_MAX_CONCURRENT_REG_MR: threads that register memory at a time; 0: as many as there are CPUs.
    uint32_t registration_threads;
    /// MC_IB_PORT: port of each NIC.
    uint32_t ib_port;
    /// MC_GID_INDEX; -1: the best kind.
    int32_t gid_index;
    /// MC_PKEY_INDEX.
    uint32_t pkey_index;
    /// MC_IB_TC; -1: it is not set.
    int32_t ib_traffic_class;
    /// MC_IB_SL; -1: it is not set.
    int32_t ib_service_level;
    /// MC_MTU in bytes.
    uint32_t mtu;
    /// MC_NUM_CQ_PER_CTX: completion queues of a NIC.
    uint32_t completion_queues;
    /// MC_MAX_CQE_PER_CTX: entries of a completion queue.
    uint32_t completion_queue_entries;
    /// MC_MAX_EP_PER_CTX: endpoints of a NIC.
    uint32_t max_endpoints;
    /// MC_NUM_QP_PER_EP: queue pairs of an endpoint.
    uint32_t queue_pairs_per_endpoint;
    /// MC_MAX_SGE.
    uint32_t max_pieces;
    /// MC_MAX_WR: work requests of a queue pair that may be under way.
    uint32_t max_work_requests;
    /// 1 if MC_MAX_WR is set, else 0.
    uint32_t max_work_requests_is_set;
    /// MC_MAX_INLINE in bytes.
    uint32_t max_inline;
    /// MC_RETRY_CNT: how often a slice is tried.
    uint32_t retry_count;
    /// MC_AUTO_GID_MAX_RETRIES.
    uint32_t gid_retries;
    /// MC_RDMA_RAIL_PAUSE_SECONDS.
    uint32_t rail_pause_s;
    /// MC_CONN_PAUSE_TTL_MS.
    uint32_t reconnect_pause_ms;
    /// MC_ENDPOINT_STORE_TYPE: 1 for SIEVE, 0 for FIFO.
    uint32_t endpoint_sieve;
    /// MC_IB_PCI_RELAXED_ORDERING: 0 if it forbids that, else 1.
    uint32_t relaxed_ordering;
    /// MC_PATH_ROUNDROBIN: 1 if NICs are chosen in turn, else 0.
    uint32_t round_robin;
    /// MC_ENABLE_DEST_DEVICE_AFFINITY: 1 if the peer's NIC of the same name is preferred, else 0.
    uint32_t same_name_affinity;
    /// MC_ENABLE_HCA_PEER_AFFINITY: 1 if MC_NIC_PEER_AFFINITY holds, else 0.
    uint32_t peer_affinity;
    /// MC_FORCE_TCP: 1 if it is set, else 0.
    uint32_t force_tcp;
    /// MC_FORCE_HCA: 1 if it is set, else 0.
    uint32_t force_rdma;
    /// MC_TCP_STATUS_TIMEOUT_SEC.
    uint32_t tcp_status_timeout_s;
    /// MC_TCP_LANES_PER_PEER: connections to one peer.
    uint32_t tcp_lanes_per_peer;
} te_configuration;

/// Reads the environment, anew at each call, and tells what it says. Variables that are out of range have
/// their defaults. Engines that are there already keep what they have.
///
/// Set `configuration->struct_size` before the call.
te_status te_read_configuration(te_configuration *configuration);

#ifdef __cplusplus
}
#endif

#endif
