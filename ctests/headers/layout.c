/* Layouts and numbers of transfer_engine_c.h are those of programs that were compiled against upstream's header, and those of te.h
 * do not change once they are out. Compiled as C11 and as C++17. */
#include <stddef.h>
#include <te.h>
#include <transfer_engine_c.h>

#ifdef __cplusplus
#define SAME(actual, expected) static_assert((actual) == (expected), #actual)
#else
#define SAME(actual, expected) _Static_assert((actual) == (expected), #actual)
#endif
#define AT(type, field, offset) SAME(offsetof(type, field), offset)

SAME(sizeof(transfer_engine_t), 8);
SAME(sizeof(transport_t), 8);
SAME(sizeof(segment_handle_t), 4);
SAME(sizeof(segment_id_t), 4);
SAME(sizeof(batch_id_t), 8);
SAME((segment_handle_t)-1 < 0, 1);
SAME((batch_id_t)-1 > 0, 1);
SAME(LOCAL_SEGMENT, 0);
SAME(INVALID_BATCH, UINT64_MAX);
SAME(OPCODE_READ, 0);
SAME(OPCODE_WRITE, 1);
SAME(STATUS_WAITING, 0);
SAME(STATUS_PENDING, 1);
SAME(STATUS_INVALID, 2);
SAME(STATUS_CANCELED, 3);
SAME(STATUS_COMPLETED, 4);
SAME(STATUS_TIMEOUT, 5);
SAME(STATUS_FAILED, 6);

SAME(sizeof(struct transfer_request), 40);
SAME(sizeof(transfer_request_t), 40);
AT(transfer_request_t, opcode, 0);
AT(transfer_request_t, source, 8);
AT(transfer_request_t, target_id, 16);
AT(transfer_request_t, target_offset, 24);
AT(transfer_request_t, length, 32);

SAME(sizeof(struct transfer_status), 16);
SAME(sizeof(transfer_status_t), 16);
AT(transfer_status_t, status, 0);
AT(transfer_status_t, transferred_bytes, 8);

SAME(sizeof(struct notify_msg), 16);
SAME(sizeof(notify_msg_t), 16);
AT(notify_msg_t, name, 0);
AT(notify_msg_t, msg, 8);

SAME(sizeof(struct buffer_entry), 16);
SAME(sizeof(buffer_entry_t), 16);
AT(buffer_entry_t, addr, 0);
AT(buffer_entry_t, length, 8);

SAME(sizeof(struct nic_load_stat), 80);
SAME(sizeof(nic_load_stat_t), 80);
AT(nic_load_stat_t, device_name, 0);
AT(nic_load_stat_t, inflight_bytes, 64);
AT(nic_load_stat_t, ewma_bandwidth_bps, 72);

SAME(sizeof(struct segment_desc), 48);
SAME(sizeof(segment_desc_t), 48);
AT(segment_desc_t, type, 0);
AT(segment_desc_t, desc_, 8);
AT(segment_desc_t, desc_.rdma.addr, 8);
AT(segment_desc_t, desc_.rdma.size, 16);
AT(segment_desc_t, desc_.rdma.location, 24);
AT(segment_desc_t, desc_.nvmeof.file_path, 8);
AT(segment_desc_t, desc_.nvmeof.subsystem_name, 16);
AT(segment_desc_t, desc_.nvmeof.proto, 24);
AT(segment_desc_t, desc_.nvmeof.ip, 32);
AT(segment_desc_t, desc_.nvmeof.port, 40);

SAME(sizeof(te_status), 4);
SAME(sizeof(te_segment), 8);
SAME(sizeof(te_batch), 8);
SAME(sizeof(te_engine_options), 64);
AT(te_engine_options, nics, 40);
AT(te_engine_options, nic_count, 48);
AT(te_engine_options, topology_handle, 56);
SAME(sizeof(te_memory_options), 32);
SAME(sizeof(te_buffer), 16);
SAME(sizeof(te_memory_region), 96);
AT(te_memory_options, parallel, 28);
SAME(sizeof(te_registration_cost), 64);
AT(te_registration_cost, device_count, 60);
SAME(sizeof(te_device_cost), 80);
AT(te_device_cost, name, 16);
SAME(sizeof(te_pool_options), 80);
AT(te_pool_options, arena, 8);
AT(te_pool_options, location, 24);
AT(te_pool_options, workers, 32);
AT(te_pool_options, alignment, 40);
AT(te_pool_options, get_reserve, 64);
AT(te_pool_options, fallback, 72);
SAME(sizeof(te_pool_lease), 40);
AT(te_pool_lease, direction, 8);
AT(te_pool_lease, id, 16);
AT(te_pool_lease, addr, 24);
AT(te_pool_lease, length, 32);
SAME(sizeof(te_pool_statistics), 216);
AT(te_pool_statistics, arena, 8);
AT(te_pool_statistics, ever_quarantined, 136);
AT(te_pool_statistics, puts, 144);
AT(te_pool_statistics, retried, 208);
SAME(sizeof(te_pool_item), 32);
AT(te_pool_item, length, 8);
AT(te_pool_item, segment, 16);
AT(te_pool_item, remote_addr, 24);
SAME(sizeof(te_pool_transfer_options), 32);
AT(te_pool_transfer_options, path, 8);
AT(te_pool_transfer_options, retry_pause_ms, 16);
AT(te_pool_transfer_options, timeout_ms, 24);
SAME(TE_POOL_ANY, 0);
SAME(TE_POOL_PUT, 1);
SAME(TE_POOL_GET, 2);
SAME(TE_POOL_OVER, 0);
SAME(TE_POOL_UNKNOWN, 1);
SAME(TE_POOL_NO_RESERVE, UINT64_MAX);
AT(te_memory_region, addr, 8);
AT(te_memory_region, location, 32);
SAME(sizeof(te_transfer_request), 56);
AT(te_transfer_request, opcode, 0);
AT(te_transfer_request, local, 8);
AT(te_transfer_request, segment, 16);
AT(te_transfer_request, remote_addr, 24);
AT(te_transfer_request, length, 32);
AT(te_transfer_request, retry_hint, 40);
AT(te_transfer_request, transport_hint, 44);
AT(te_transfer_request, group, 48);
SAME(sizeof(te_transfer_options), 40);
SAME(sizeof(te_transfer_result), 24);
AT(te_transfer_result, state, 8);
AT(te_transfer_result, error, 12);
AT(te_transfer_result, bytes, 16);
SAME(sizeof(te_batch_status), 48);
SAME(sizeof(te_notification), 16);
SAME(sizeof(te_location_entry), 88);
AT(te_location_entry, addr, 8);
AT(te_location_entry, length, 16);
AT(te_location_entry, location, 24);
SAME(sizeof(te_configuration), 208);
SAME(sizeof(te_nic_load), 88);
AT(te_nic_load, bytes_in_flight, 8);
AT(te_nic_load, bytes_per_second, 16);
AT(te_nic_load, name, 24);

SAME(TE_LOG_ERROR, 1);
SAME(TE_LOG_WARNING, 2);
SAME(TE_LOG_INFO, 3);
SAME(TE_LOG_DEBUG, 4);
SAME(TE_LOG_TRACE, 5);
SAME(TE_OK, 0);
SAME(TE_ERR_INVALID_ARGUMENT, -1);
SAME(TE_ERR_TOO_MANY_REQUESTS, -2);
SAME(TE_ERR_ADDRESS_NOT_REGISTERED, -3);
SAME(TE_ERR_BATCH_BUSY, -4);
SAME(TE_ERR_DEVICE_NOT_FOUND, -6);
SAME(TE_ERR_ADDRESS_OVERLAPPED, -7);
SAME(TE_ERR_DNS, -101);
SAME(TE_ERR_SOCKET, -102);
SAME(TE_ERR_MALFORMED_JSON, -103);
SAME(TE_ERR_REJECT_HANDSHAKE, -104);
SAME(TE_ERR_METADATA, -200);
SAME(TE_ERR_ENDPOINT, -201);
SAME(TE_ERR_CONTEXT, -202);
SAME(TE_ERR_MEMORY, -302);
SAME(TE_ERR_NOT_IMPLEMENTED, -303);
SAME(TE_ERR_NOT_SUPPORTED_TRANSPORT, -1001);
SAME(TE_ERR_TIMEOUT, -1002);
SAME(TE_ERR_CANCELED, -1003);
SAME(TE_ERR_INTERNAL, -1004);
SAME(TE_ERR_FAULT, -1005);
SAME(TE_ERR_FORKED, -1006);
SAME(TE_ERR_INVALID_HANDLE, -1007);
SAME(TE_ERR_LIMIT, -1008);
SAME(TE_ACCESS_REMOTE, 0);
SAME(TE_ACCESS_LOCAL, 1);
SAME(TE_PUBLISH_NOW, 0);
SAME(TE_PUBLISH_LATER, 1);
SAME(TE_REFERENCES_DEFAULT, 0);
SAME(TE_REFERENCES_ON, 1);
SAME(TE_REFERENCES_OFF, 2);
SAME(TE_LOCAL_SEGMENT, 0);
SAME(TE_READ, 0);
SAME(TE_WRITE, 1);
SAME(TE_STATE_WAITING, 0);
SAME(TE_STATE_PENDING, 1);
SAME(TE_STATE_INVALID, 2);
SAME(TE_STATE_CANCELED, 3);
SAME(TE_STATE_COMPLETED, 4);
SAME(TE_STATE_TIMEOUT, 5);
SAME(TE_STATE_FAILED, 6);
