/* A libibverbs.so.1 without a kernel behind it, for tests.
 *
 * It has FAKE_VERBS_DEVICES devices (2 without that variable): fake0, fake1, … Registration checks that the range is mapped, takes as long
 * as the test says, and fails when the test says. Queue pairs of the same process that are connected to each other move bytes by memcpy on
 * the thread that posts, with the checks of a real device: keys, ranges, access, protection domains, states, queue sizes.
 *
 * With wire_mbits a completion is seen only when its bytes have had their time on the device's wire, which carries them one work request after
 * the other; bytes are in place before. No thread spins for it: polls look at the clock, and one thread of the library sleeps until the next
 * completion that somebody wants an event of, with a timer slack of 1 ns instead of the usual 50 us: where a CPU is free, it wakes within some
 * microseconds of that time. Registrations, whose time is a CPU's on real devices, sleep for all but the last 120 us, spin to the end, and are exact.
 *
 * Tests drive it by fake_verbs_set and fake_verbs_get, whose names are those of SETTINGS and COUNTERS below, and by fake_verbs_event. Two
 * more can be set, for the whole library: "devices", their number, and "list_errno". One lock covers everything; scripted delays pass outside of it. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#undef ibv_query_port
#undef ibv_reg_mr

enum { MOST_DEVICES = 64, GIDS = 3 };

/* What a test may set, for each device. */
#define SETTINGS(X)                                                                     \
	X(open_errno, 0)            /* opening fails with it; so on */                  \
	X(domain_errno, 0)          /* allocating a protection domain */                \
	X(channel_errno, 0)         /* creating a completion channel */                 \
	X(queue_errno, 0)           /* creating a completion queue */                   \
	X(poll_errno, 0)            /* polling a completion queue */                    \
	X(register_microseconds, 0) /* how long each registration takes at least … */   \
	X(register_microseconds_per_mib, 0) /* … and longer by its size */              \
	X(register_serially, 0) /* one after the other: the device does them, not the callers' threads */ \
	X(deregister_microseconds, 0)                                                   \
	X(register_fail_at, 0) /* the registration that fails: 1 is the next; 0 none */ \
	X(register_fail_from, 0) /* like it, and all after it */                        \
	X(register_errno, ENOMEM)                                                       \
	X(deregister_fail_at, 0)                                                        \
	X(deregister_errno, EIO)                                                        \
	X(check_mapped, 1) /* refuse ranges that are not mapped */                      \
	X(max_mr_size, 1L << 40)                                                        \
	X(max_mr, 1 << 20)                                                              \
	X(max_qp, 65536)                                                                \
	X(max_qp_wr, 16384)                                                             \
	X(max_cqe, 1 << 20)                                                             \
	X(port_state, IBV_PORT_ACTIVE)                                                  \
	X(link_layer, IBV_LINK_LAYER_ETHERNET)                                          \
	X(active_mtu, IBV_MTU_4096)                                                     \
	X(gid_subnet, 0)  /* changes the addresses in the GIDs */                       \
	X(rtr_errno, 0)   /* connecting fails with it … */                              \
	X(rtr_fail_gid_index, -1) /* … for this index of the own GID; -1 for any */     \
	X(post_errno, 0)  /* posting fails with it … */                                 \
	X(post_fail_at, 0) /* … at this work request: 1 is the next; 0 none */          \
	X(doorbell_errno, 0) /* what the next call posts runs, but the call fails with it and does not say where */ \
	X(status_at, 0)   /* the work request, by the same count, that ends with … */   \
	X(status, IBV_WC_RETRY_EXC_ERR)                                                 \
	X(hold, 0)        /* work is queued and does not run until this is 0 again */   \
	X(flush, 1)       /* 0: a queue pair that fails keeps what is queued, until it is destroyed; 2: that flushes it */ \
	X(flush_status, IBV_WC_WR_FLUSH_ERR) /* what the first of it ends with; soft-RoCE may say success */ \
	X(copy, 1)        /* 0: everything but the copy, to measure what callers cost */ \
	X(wire_mbits, 0)  /* megabits a second of the device's wire; 0: completions are there at once */ \
	X(timed, 0)       /* whether the time that calls take is added up, for the same end */

/* What a test may read, for each device. */
#define COUNTERS(X)                                                          \
	X(contexts)        /* open ones; so on to queue pairs: live objects */ \
	X(domains)                                                           \
	X(regions)                                                           \
	X(region_bytes)                                                      \
	X(channels)                                                          \
	X(queues)                                                            \
	X(queue_pairs)                                                       \
	X(registrations)   /* successful ones, ever */                       \
	X(deregistrations)                                                   \
	X(relaxed_registrations)                                             \
	X(registering)     /* under way now, and the most at a time ever */  \
	X(most_registering)                                                  \
	X(posts)           /* calls, and work requests in them */            \
	X(posted)                                                            \
	X(polls)           /* calls */                                       \
	X(protection_errors) /* work requests with a bad key or range of this side */ \
	X(bytes_read)      /* moved by queue pairs of this device */         \
	X(bytes_written)                                                     \
	X(work_ns)         /* posting and polling; registering and back */   \
	X(memory_ns)

struct device {
	struct ibv_device device;
	int number;
#define X(name, value) long name;
	SETTINGS(X)
#undef X
#define X(name) long name;
	COUNTERS(X)
#undef X
	long registers_until; /* when the last registration ends, in ns */
	long wire_free; /* when the wire has carried all that was posted, in ns */
	struct context *first;
	struct region **regions_by_key;
	uint32_t keys, free_key; /* key index 0 is never used; free ones are chained through `next_free` */
	uint32_t *next_free;
};

struct context {
	struct ibv_context context;
	struct device *device;
	struct context *next;
	int event_writer;
};

struct region {
	struct ibv_mr mr;
	int access;
};

struct channel {
	struct ibv_comp_channel channel;
	int writer;
};

struct queue {
	struct ibv_cq cq;
	struct ibv_wc *ring;
	struct pair **owners;
	long *seen_from; /* when each is seen, in ns; never earlier than the one before */
	uint32_t head, count;
	uint32_t told; /* of them, from the head on: no event will be for them */
	int armed;
	struct queue *next;
};

struct work {
	uint64_t id, remote_address;
	struct ibv_sge piece;
	uint32_t remote_key;
	enum ibv_wr_opcode opcode;
};

struct pair {
	struct ibv_qp qp;
	struct device *device;
	struct ibv_qp_attr attributes;
	struct ibv_qp_cap cap;
	uint32_t outstanding; /* posted and not yet polled */
	struct work *waiting; /* a ring of cap.max_send_wr */
	uint32_t first, waiting_count;
	int events_told; /* and not acknowledged: it is not destroyed before */
	struct pair *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct device devices[MOST_DEVICES];
static int device_count = -1;
/* Listing devices fails with it: ENOSYS is what the real library says where the kernel has no RDMA. */
static int list_errno;
/* Found by number: numbers begin at 256 and are not used again. */
static struct pair *pairs[4096];
static uint32_t next_number = 256;
static long all_registering, most_all_registering;
static struct queue *all_queues;
static pthread_cond_t timer_changed;
static int timer_runs;

static void initialize(void)
{
	if (device_count >= 0)
		return;
	const char *text = getenv("FAKE_VERBS_DEVICES");
	device_count = text ? atoi(text) : 2;
	if (device_count > MOST_DEVICES)
		device_count = MOST_DEVICES;
	for (int i = 0; i < MOST_DEVICES; i++) {
		struct device *d = &devices[i];
		d->number = i;
		snprintf(d->device.name, sizeof d->device.name, "fake%d", i);
		snprintf(d->device.dev_name, sizeof d->device.dev_name, "uverbs%d", i);
		d->device.node_type = IBV_NODE_CA;
		d->device.transport_type = IBV_TRANSPORT_IB;
#define X(name, value) d->name = value;
		SETTINGS(X)
#undef X
	}
}

static long clock_ns(void)
{
	struct timespec time;
	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec * 1000000000 + time.tv_nsec;
}

static struct timespec time_of(long ns)
{
	return (struct timespec){ns / 1000000000, ns % 1000000000};
}

static void sleep_microseconds(long microseconds)
{
	struct timespec time = {microseconds / 1000000, microseconds % 1000000 * 1000};
	if (microseconds > 0)
		nanosleep(&time, NULL);
}

/* Ends within a microsecond of that time, where the CPU is not taken away. */
static void work_until(long until)
{
	enum { SPUN = 120 };
	sleep_microseconds((until - clock_ns()) / 1000 - SPUN);
	while (clock_ns() < until)
		;
}

static long now(const struct device *device)
{
	return device->timed ? clock_ns() : 0;
}

static void spent(long *counter, const struct device *device, long since)
{
	if (device->timed)
		__atomic_fetch_add(counter, now(device) - since, __ATOMIC_RELAXED);
}

/* Counts a countdown down; 1 when it is due. */
static int due(long *at)
{
	return *at > 0 && --*at == 0;
}

static struct pair *find_pair(uint32_t number)
{
	struct pair *pair = pairs[number % 4096];
	while (pair && pair->qp.qp_num != number)
		pair = pair->next;
	return pair;
}

static void gid_of(const struct device *device, int index, union ibv_gid *gid)
{
	static const uint8_t link_local[16] = {0xfe, 0x80, [8] = 0x02, [15] = 1};
	static const uint8_t mapped[16] = {[10] = 0xff, [11] = 0xff, [12] = 192, [13] = 168};
	memcpy(gid->raw, index == 0 ? link_local : mapped, 16);
	if (index == 0) {
		gid->raw[14] = device->number + 1;
	} else {
		gid->raw[14] = device->gid_subnet;
		gid->raw[15] = device->number + 1;
	}
	if (index == GIDS - 1)
		memset(gid->raw, 0, 16); /* an unused entry */
}

/* --- control ------------------------------------------------------------------------------------------------------------- */

static void run(struct pair *pair);

/* Sets a setting of a device, or of all where `device` is -1. 0, or -1 where there is no such name or device. */
int fake_verbs_set(int device, const char *name, long value)
{
	int result = -1;
	pthread_mutex_lock(&lock);
	initialize();
	for (int i = 0; i < MOST_DEVICES; i++) {
		if (device != -1 && device != i)
			continue;
#define X(setting, initial)                       \
	if (strcmp(name, #setting) == 0) {        \
		devices[i].setting = value;       \
		result = 0;                       \
	}
		SETTINGS(X)
#undef X
	}
	if (strcmp(name, "devices") == 0 && value <= MOST_DEVICES) {
		device_count = value;
		result = 0;
	}
	if (strcmp(name, "list_errno") == 0) {
		list_errno = value;
		result = 0;
	}
	if (strcmp(name, "hold") == 0 && value == 0)
		for (int i = 0; i < 4096; i++)
			for (struct pair *pair = pairs[i]; pair; pair = pair->next)
				run(pair);
	pthread_mutex_unlock(&lock);
	return result;
}

/* Reads a counter or setting of a device; with device -1, the sum of a counter over all, or "most_registering" of all together. */
long fake_verbs_get(int device, const char *name)
{
	long sum = 0;
	pthread_mutex_lock(&lock);
	initialize();
	for (int i = 0; i < MOST_DEVICES; i++) {
		if (device != -1 && device != i)
			continue;
#define X(counter, ...)                     \
	if (strcmp(name, #counter) == 0)    \
		sum += devices[i].counter;
		COUNTERS(X)
		SETTINGS(X)
#undef X
	}
	if (device == -1 && strcmp(name, "most_registering") == 0)
		sum = most_all_registering;
	pthread_mutex_unlock(&lock);
	return sum;
}

static void raise_event(struct context *context, struct ibv_async_event *event)
{
	ssize_t written = write(context->event_writer, event, sizeof *event);
	(void)written;
}

/* Raises an event of the device's port 1, or of the device itself, in all contexts. */
void fake_verbs_event(int device, int type)
{
	struct ibv_async_event event = {.event_type = type, .element.port_num = 1};
	pthread_mutex_lock(&lock);
	initialize();
	for (struct context *context = devices[device].first; context; context = context->next)
		raise_event(context, &event);
	pthread_mutex_unlock(&lock);
}

/* --- devices ------------------------------------------------------------------------------------------------------------- */

struct ibv_device **ibv_get_device_list(int *count)
{
	pthread_mutex_lock(&lock);
	initialize();
	int found = device_count, error = list_errno;
	pthread_mutex_unlock(&lock);
	if (error) {
		errno = error;
		return NULL;
	}
	struct ibv_device **list = calloc(found + 1, sizeof *list);
	for (int i = 0; i < found; i++)
		list[i] = &devices[i].device;
	if (count)
		*count = found;
	return list;
}

void ibv_free_device_list(struct ibv_device **list)
{
	free(list);
}

const char *ibv_get_device_name(struct ibv_device *device)
{
	return device->name;
}

static int poll_queue(struct ibv_cq *cq, int most, struct ibv_wc *completions);
static int arm_queue(struct ibv_cq *cq, int solicited_only);
static int post(struct ibv_qp *qp, struct ibv_send_wr *work, struct ibv_send_wr **bad);

struct ibv_context *ibv_open_device(struct ibv_device *raw)
{
	struct device *device = (struct device *)raw;
	if (device->open_errno) {
		errno = device->open_errno;
		return NULL;
	}
	int ends[2];
	if (pipe2(ends, O_CLOEXEC))
		return NULL;
	struct context *context = calloc(1, sizeof *context);
	context->context.device = raw;
	context->context.async_fd = ends[0];
	context->context.cmd_fd = -1;
	context->context.num_comp_vectors = 1;
	context->context.ops.poll_cq = poll_queue;
	context->context.ops.req_notify_cq = arm_queue;
	context->context.ops.post_send = post;
	context->event_writer = ends[1];
	context->device = device;
	pthread_mutex_lock(&lock);
	context->next = device->first;
	device->first = context;
	device->contexts++;
	pthread_mutex_unlock(&lock);
	return &context->context;
}

int ibv_close_device(struct ibv_context *raw)
{
	struct context *context = (struct context *)raw;
	pthread_mutex_lock(&lock);
	struct context **link = &context->device->first;
	while (*link != context)
		link = &(*link)->next;
	*link = context->next;
	context->device->contexts--;
	pthread_mutex_unlock(&lock);
	close(raw->async_fd);
	close(context->event_writer);
	free(context);
	return 0;
}

static struct device *device_of(struct ibv_context *context)
{
	return ((struct context *)context)->device;
}

static int is_of_pair(const struct ibv_async_event *event)
{
	return event->event_type == IBV_EVENT_QP_ACCESS_ERR || event->event_type == IBV_EVENT_QP_FATAL ||
	       event->event_type == IBV_EVENT_QP_REQ_ERR;
}

/* The pair of an event, unless it is gone: events of what was destroyed are not told. */
static struct pair *pair_of(const struct ibv_async_event *event)
{
	for (int i = 0; i < 4096; i++)
		for (struct pair *pair = pairs[i]; pair; pair = pair->next)
			if (&pair->qp == event->element.qp)
				return pair;
	return NULL;
}

int ibv_get_async_event(struct ibv_context *context, struct ibv_async_event *event)
{
	for (;;) {
		if (read(context->async_fd, event, sizeof *event) != sizeof *event)
			return -1;
		if (!is_of_pair(event))
			return 0;
		pthread_mutex_lock(&lock);
		struct pair *pair = pair_of(event);
		if (pair)
			pair->events_told++;
		pthread_mutex_unlock(&lock);
		if (pair)
			return 0;
	}
}

void ibv_ack_async_event(struct ibv_async_event *event)
{
	if (!is_of_pair(event))
		return;
	pthread_mutex_lock(&lock);
	struct pair *pair = pair_of(event);
	if (pair)
		pair->events_told--;
	pthread_mutex_unlock(&lock);
}

int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *attributes)
{
	struct device *device = device_of(context);
	memset(attributes, 0, sizeof *attributes);
	attributes->max_mr_size = device->max_mr_size;
	attributes->page_size_cap = 4096;
	attributes->max_mr = device->max_mr;
	attributes->max_qp = device->max_qp;
	attributes->max_qp_wr = device->max_qp_wr;
	attributes->max_sge = 16;
	attributes->max_cq = 65536;
	attributes->max_cqe = device->max_cqe;
	attributes->max_pd = 65536;
	attributes->max_qp_rd_atom = 16;
	attributes->max_qp_init_rd_atom = 16;
	attributes->phys_port_cnt = 1;
	return 0;
}

int ibv_query_port(struct ibv_context *context, uint8_t port, struct _compat_ibv_port_attr *raw)
{
	struct device *device = device_of(context);
	struct ibv_port_attr *attributes = (struct ibv_port_attr *)raw;
	if (port != 1)
		return EINVAL;
	/* Like the real one, this does not touch the fields that were added after the first version. */
	memset(attributes, 0, offsetof(struct ibv_port_attr, flags));
	attributes->state = device->port_state;
	attributes->max_mtu = IBV_MTU_4096;
	attributes->active_mtu = device->active_mtu;
	attributes->gid_tbl_len = GIDS;
	attributes->pkey_tbl_len = 1;
	attributes->lid = device->link_layer == IBV_LINK_LAYER_ETHERNET ? 0 : device->number + 1;
	attributes->link_layer = device->link_layer;
	attributes->active_speed = 32;
	attributes->active_width = 2;
	return 0;
}

int ibv_query_gid(struct ibv_context *context, uint8_t port, int index, union ibv_gid *gid)
{
	if (port != 1 || index < 0 || index >= GIDS) {
		errno = EINVAL;
		return -1;
	}
	gid_of(device_of(context), index, gid);
	return 0;
}

struct ibv_pd *ibv_alloc_pd(struct ibv_context *context)
{
	if (device_of(context)->domain_errno) {
		errno = device_of(context)->domain_errno;
		return NULL;
	}
	struct ibv_pd *domain = calloc(1, sizeof *domain);
	domain->context = context;
	__atomic_fetch_add(&device_of(context)->domains, 1, __ATOMIC_RELAXED);
	return domain;
}

int ibv_dealloc_pd(struct ibv_pd *domain)
{
	__atomic_fetch_sub(&device_of(domain->context)->domains, 1, __ATOMIC_RELAXED);
	free(domain);
	return 0;
}

/* --- memory -------------------------------------------------------------------------------------------------------------- */

static int is_mapped(uintptr_t address, size_t length)
{
	unsigned char present[4096];
	uintptr_t from = address & ~(uintptr_t)4095;
	/* Beyond 16 MiB only both ends are looked at. */
	uintptr_t end = address + length;
	size_t head = end - from > sizeof present * 4096 ? sizeof present * 4096 : end - from;
	return mincore((void *)from, head, present) == 0 && mincore((void *)((end - 1) & ~(uintptr_t)4095), 1, present) == 0;
}

static uint32_t take_key(struct device *device)
{
	if (device->free_key == 0) {
		uint32_t more = device->keys ? device->keys * 2 : 1024;
		device->regions_by_key = realloc(device->regions_by_key, more * sizeof *device->regions_by_key);
		device->next_free = realloc(device->next_free, more * sizeof *device->next_free);
		device->regions_by_key[0] = NULL; /* no region has key 0 */
		for (uint32_t i = more - 1; i >= (device->keys ? device->keys : 1); i--) {
			device->regions_by_key[i] = NULL;
			device->next_free[i] = device->free_key;
			device->free_key = i;
		}
		device->keys = more;
	}
	uint32_t key = device->free_key;
	device->free_key = device->next_free[key];
	return key;
}

static struct ibv_mr *register_memory(struct ibv_pd *domain, void *address, size_t length, unsigned access)
{
	struct device *device = device_of(domain->context);
	long since = now(device);
	pthread_mutex_lock(&lock);
	long registering = ++device->registering, all = ++all_registering;
	if (registering > device->most_registering)
		device->most_registering = registering;
	if (all > most_all_registering)
		most_all_registering = all;
	int error = 0;
	if (due(&device->register_fail_at))
		error = device->register_errno;
	if (device->register_fail_from > 0 && (device->register_fail_from == 1 || --device->register_fail_from == 0)) {
		device->register_fail_from = 1;
		error = device->register_errno;
	}
	if (length == 0 || length > (size_t)device->max_mr_size)
		error = EINVAL;
	if (device->regions >= device->max_mr)
		error = ENOMEM;
	long delay = device->register_microseconds + (long)(device->register_microseconds_per_mib * length >> 20);
	int check = device->check_mapped;
	long until = 0;
	if (!error && delay > 0) {
		until = clock_ns();
		if (device->register_serially && until < device->registers_until)
			until = device->registers_until;
		until += delay * 1000;
		device->registers_until = until;
	}
	pthread_mutex_unlock(&lock);

	if (until)
		work_until(until);
	if (!error && check && !is_mapped((uintptr_t)address, length))
		error = EFAULT;

	struct region *region = error ? NULL : calloc(1, sizeof *region);
	pthread_mutex_lock(&lock);
	device->registering--;
	all_registering--;
	if (region) {
		static uint8_t generation;
		uint32_t key = take_key(device);
		region->mr.context = domain->context;
		region->mr.pd = domain;
		region->mr.addr = address;
		region->mr.length = length;
		region->mr.handle = key;
		region->mr.lkey = region->mr.rkey = key << 8 | generation++;
		region->access = access;
		device->regions_by_key[key] = region;
		device->regions++;
		device->region_bytes += length;
		device->registrations++;
		if (access & IBV_ACCESS_RELAXED_ORDERING)
			device->relaxed_registrations++;
	}
	pthread_mutex_unlock(&lock);
	spent(&device->memory_ns, device, since);
	errno = error;
	return region ? &region->mr : NULL;
}

struct ibv_mr *ibv_reg_mr(struct ibv_pd *domain, void *address, size_t length, int access)
{
	return register_memory(domain, address, length, access);
}

struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *domain, void *address, size_t length, uint64_t iova, unsigned int access)
{
	if (iova != (uintptr_t)address) {
		errno = EINVAL;
		return NULL;
	}
	return register_memory(domain, address, length, access);
}

int ibv_dereg_mr(struct ibv_mr *mr)
{
	struct device *device = device_of(mr->context);
	long since = now(device);
	pthread_mutex_lock(&lock);
	if (due(&device->deregister_fail_at)) {
		int error = device->deregister_errno;
		pthread_mutex_unlock(&lock);
		return error;
	}
	device->regions_by_key[mr->handle] = NULL;
	device->next_free[mr->handle] = device->free_key;
	device->free_key = mr->handle;
	device->regions--;
	device->region_bytes -= mr->length;
	device->deregistrations++;
	long delay = device->deregister_microseconds;
	pthread_mutex_unlock(&lock);
	if (delay > 0)
		work_until(clock_ns() + delay * 1000);
	free(mr);
	spent(&device->memory_ns, device, since);
	return 0;
}

/* The memory that a key and range name in a domain, or NULL. */
static void *translate(struct device *device, struct ibv_pd *domain, uint32_t key, uint64_t address, uint64_t length, unsigned access)
{
	uint32_t index = key >> 8;
	struct region *region = index < device->keys ? device->regions_by_key[index] : NULL;
	if (!region || region->mr.lkey != key || region->mr.pd != domain || (region->access & access) != access)
		return NULL;
	uint64_t start = (uintptr_t)region->mr.addr;
	if (address < start || address - start > region->mr.length || length > region->mr.length - (address - start))
		return NULL;
	return (void *)(uintptr_t)address;
}

/* --- completions --------------------------------------------------------------------------------------------------------- */

struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *context)
{
	int ends[2];
	if (device_of(context)->channel_errno) {
		errno = device_of(context)->channel_errno;
		return NULL;
	}
	if (pipe2(ends, O_CLOEXEC))
		return NULL;
	struct channel *channel = calloc(1, sizeof *channel);
	channel->channel.context = context;
	channel->channel.fd = ends[0];
	channel->writer = ends[1];
	__atomic_fetch_add(&device_of(context)->channels, 1, __ATOMIC_RELAXED);
	return &channel->channel;
}

int ibv_destroy_comp_channel(struct ibv_comp_channel *raw)
{
	struct channel *channel = (struct channel *)raw;
	if (raw->refcnt)
		return EBUSY;
	__atomic_fetch_sub(&device_of(raw->context)->channels, 1, __ATOMIC_RELAXED);
	close(raw->fd);
	close(channel->writer);
	free(channel);
	return 0;
}

struct ibv_cq *ibv_create_cq(struct ibv_context *context, int entries, void *cookie, struct ibv_comp_channel *channel, int vector)
{
	struct device *device = device_of(context);
	if (device->queue_errno) {
		errno = device->queue_errno;
		return NULL;
	}
	if (entries < 1 || entries > device->max_cqe || vector != 0) {
		errno = EINVAL;
		return NULL;
	}
	struct queue *queue = calloc(1, sizeof *queue);
	queue->cq.context = context;
	queue->cq.channel = channel;
	queue->cq.cq_context = cookie;
	queue->cq.cqe = entries;
	queue->ring = calloc(entries, sizeof *queue->ring);
	queue->owners = calloc(entries, sizeof *queue->owners);
	queue->seen_from = calloc(entries, sizeof *queue->seen_from);
	pthread_mutex_lock(&lock);
	queue->next = all_queues;
	all_queues = queue;
	pthread_mutex_unlock(&lock);
	if (channel)
		__atomic_fetch_add(&channel->refcnt, 1, __ATOMIC_RELAXED);
	__atomic_fetch_add(&device->queues, 1, __ATOMIC_RELAXED);
	return &queue->cq;
}

int ibv_destroy_cq(struct ibv_cq *raw)
{
	struct queue *queue = (struct queue *)raw;
	if (raw->channel)
		__atomic_fetch_sub(&raw->channel->refcnt, 1, __ATOMIC_RELAXED);
	__atomic_fetch_sub(&device_of(raw->context)->queues, 1, __ATOMIC_RELAXED);
	pthread_mutex_lock(&lock);
	struct queue **link = &all_queues;
	while (*link != queue)
		link = &(*link)->next;
	*link = queue->next;
	pthread_mutex_unlock(&lock);
	free(queue->ring);
	free(queue->owners);
	free(queue->seen_from);
	free(queue);
	return 0;
}

int ibv_get_cq_event(struct ibv_comp_channel *channel, struct ibv_cq **cq, void **cookie)
{
	if (read(channel->fd, cq, sizeof *cq) != sizeof *cq)
		return -1;
	*cookie = (*cq)->cq_context;
	return 0;
}

void ibv_ack_cq_events(struct ibv_cq *cq, unsigned int events)
{
	__atomic_fetch_add(&cq->comp_events_completed, events, __ATOMIC_RELAXED);
}

static uint32_t place_of(const struct queue *queue, uint32_t index)
{
	return (queue->head + index) % queue->cq.cqe;
}

/* Marks the completions that are seen by now, and raises the event that somebody waits for. When the next is seen, or 0 if there is none. */
static long tell(struct queue *queue, long now)
{
	uint32_t told = queue->told;
	while (queue->told < queue->count && queue->seen_from[place_of(queue, queue->told)] <= now)
		queue->told++;
	if (queue->told > told && queue->armed && queue->cq.channel) {
		struct ibv_cq *cq = &queue->cq;
		queue->armed = 0;
		ssize_t written = write(((struct channel *)queue->cq.channel)->writer, &cq, sizeof cq);
		(void)written;
	}
	return queue->told < queue->count ? queue->seen_from[place_of(queue, queue->told)] : 0;
}

/* Raises the events of completions that are not seen at once. */
static void *keep_time(void *unused)
{
	(void)unused;
	prctl(PR_SET_NAME, "fake-verbs");
	prctl(PR_SET_TIMERSLACK, 1);
	pthread_mutex_lock(&lock);
	for (;;) {
		long next = 0, now = clock_ns();
		for (struct queue *queue = all_queues; queue; queue = queue->next) {
			long seen = queue->armed ? tell(queue, now) : 0;
			/* An event that was raised just now is the last until the queue is armed again. */
			if (queue->armed && seen && (!next || seen < next))
				next = seen;
		}
		struct timespec until = time_of(next);
		if (next)
			pthread_cond_timedwait(&timer_changed, &lock, &until);
		else
			pthread_cond_wait(&timer_changed, &lock);
	}
	return NULL;
}

/* Has the thread look at the queues, which it does not yet know to be worth it. */
static void wake_timer(void)
{
	if (!timer_runs) {
		pthread_condattr_t attributes;
		pthread_t thread;
		pthread_condattr_init(&attributes);
		pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
		pthread_cond_init(&timer_changed, &attributes);
		if (pthread_create(&thread, NULL, keep_time, NULL))
			abort();
		pthread_detach(thread);
		timer_runs = 1;
	}
	pthread_cond_signal(&timer_changed);
}

static void complete(struct pair *pair, uint64_t id, enum ibv_wc_status status, enum ibv_wr_opcode opcode, uint32_t bytes)
{
	struct queue *queue = (struct queue *)pair->qp.send_cq;
	if (queue->count == (uint32_t)queue->cq.cqe) {
		struct ibv_async_event event = {.event_type = IBV_EVENT_CQ_ERR, .element.cq = &queue->cq};
		raise_event((struct context *)pair->qp.context, &event);
		return;
	}
	struct device *device = pair->device;
	long now = 0, seen_from = 0;
	if (device->wire_mbits) {
		now = clock_ns();
		if (device->wire_free < now)
			device->wire_free = now;
		device->wire_free += bytes * 8000L / device->wire_mbits;
		seen_from = device->wire_free;
	}
	uint32_t place = place_of(queue, queue->count++);
	queue->owners[place] = pair;
	queue->seen_from[place] = seen_from;
	queue->ring[place] = (struct ibv_wc){
		.wr_id = id,
		.status = status,
		.opcode = opcode == IBV_WR_RDMA_READ ? IBV_WC_RDMA_READ : IBV_WC_RDMA_WRITE,
		.byte_len = bytes,
		.qp_num = pair->qp.qp_num,
		.vendor_err = status ? 0xfa : 0,
	};
	if (tell(queue, now) && queue->armed && queue->told == queue->count - 1)
		wake_timer();
}

static int poll_queue(struct ibv_cq *raw, int most, struct ibv_wc *completions)
{
	struct queue *queue = (struct queue *)raw;
	int taken = 0;
	__atomic_fetch_add(&device_of(raw->context)->polls, 1, __ATOMIC_RELAXED);
	if (__atomic_load_n(&device_of(raw->context)->poll_errno, __ATOMIC_RELAXED))
		return -device_of(raw->context)->poll_errno;
	if (__atomic_load_n(&queue->count, __ATOMIC_RELAXED) == 0)
		return 0;
	struct device *device = device_of(raw->context);
	long since = now(device);
	pthread_mutex_lock(&lock);
	long clock = queue->count > 0 && queue->seen_from[queue->head] ? clock_ns() : 0;
	while (taken < most && queue->count > 0 && queue->seen_from[queue->head] <= clock) {
		completions[taken++] = queue->ring[queue->head];
		if (queue->owners[queue->head])
			queue->owners[queue->head]->outstanding--;
		queue->head = (queue->head + 1) % queue->cq.cqe;
		queue->count--;
		queue->told -= queue->told > 0;
	}
	pthread_mutex_unlock(&lock);
	spent(&device->work_ns, device, since);
	return taken;
}

static int arm_queue(struct ibv_cq *raw, int solicited_only)
{
	(void)solicited_only;
	struct queue *queue = (struct queue *)raw;
	pthread_mutex_lock(&lock);
	/* What is seen already is for the poll that follows. */
	if (queue->told < queue->count)
		tell(queue, clock_ns());
	queue->armed = 1;
	if (queue->told < queue->count)
		wake_timer();
	pthread_mutex_unlock(&lock);
	return 0;
}

/* --- queue pairs --------------------------------------------------------------------------------------------------------- */

struct ibv_qp *ibv_create_qp(struct ibv_pd *domain, struct ibv_qp_init_attr *attributes)
{
	struct device *device = device_of(domain->context);
	if (attributes->qp_type != IBV_QPT_RC || attributes->cap.max_send_wr < 1 ||
	    (long)attributes->cap.max_send_wr > device->max_qp_wr || attributes->cap.max_send_sge > 16) {
		errno = EINVAL;
		return NULL;
	}
	struct pair *pair = calloc(1, sizeof *pair);
	pair->device = device;
	pair->cap = attributes->cap;
	pair->waiting = calloc(pair->cap.max_send_wr, sizeof *pair->waiting);
	pair->qp.context = domain->context;
	pair->qp.pd = domain;
	pair->qp.send_cq = attributes->send_cq;
	pair->qp.recv_cq = attributes->recv_cq;
	pair->qp.qp_type = attributes->qp_type;
	pthread_mutex_lock(&lock);
	if (device->queue_pairs >= device->max_qp) {
		pthread_mutex_unlock(&lock);
		free(pair->waiting);
		free(pair);
		errno = ENOMEM;
		return NULL;
	}
	pair->qp.qp_num = next_number++;
	pair->next = pairs[pair->qp.qp_num % 4096];
	pairs[pair->qp.qp_num % 4096] = pair;
	device->queue_pairs++;
	pthread_mutex_unlock(&lock);
	return &pair->qp;
}

static struct work *take_waiting(struct pair *pair)
{
	struct work *work = &pair->waiting[pair->first];
	pair->first = (pair->first + 1) % pair->cap.max_send_wr;
	pair->waiting_count--;
	return work;
}

static void flush_pair(struct pair *pair)
{
	enum ibv_wc_status status = pair->device->flush_status;
	while (pair->waiting_count > 0) {
		struct work *work = take_waiting(pair);
		complete(pair, work->id, status, work->opcode, 0);
		status = IBV_WC_WR_FLUSH_ERR;
	}
}

int ibv_destroy_qp(struct ibv_qp *raw)
{
	struct pair *pair = (struct pair *)raw;
	struct queue *queue = (struct queue *)raw->send_cq;
	pthread_mutex_lock(&lock);
	while (pair->events_told > 0) {
		pthread_mutex_unlock(&lock);
		sleep_microseconds(100);
		pthread_mutex_lock(&lock);
	}
	if (pair->device->flush == 2)
		flush_pair(pair);
	struct pair **link = &pairs[raw->qp_num % 4096];
	while (*link != pair)
		link = &(*link)->next;
	*link = pair->next;
	pair->device->queue_pairs--;
	/* Its completions are still in the queue, as some devices leave them there, but nobody owns them any more. */
	for (uint32_t i = 0; i < queue->count; i++) {
		uint32_t place = (queue->head + i) % queue->cq.cqe;
		if (queue->owners[place] == pair)
			queue->owners[place] = NULL;
	}
	pthread_mutex_unlock(&lock);
	free(pair->waiting);
	free(pair);
	return 0;
}

static void fail_pair(struct pair *pair)
{
	pair->qp.state = IBV_QPS_ERR;
	if (pair->device->flush == 1)
		flush_pair(pair);
}

int ibv_modify_qp(struct ibv_qp *raw, struct ibv_qp_attr *attributes, int mask)
{
	struct pair *pair = (struct pair *)raw;
	enum ibv_qp_state from = raw->state, to = attributes->qp_state;
	const int init = IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
	const int receive = IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
	const int send = IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
	if (!(mask & IBV_QP_STATE))
		return EINVAL;
	mask &= ~IBV_QP_STATE;
	int result = 0;
	pthread_mutex_lock(&lock);
	union ibv_gid own;
	switch (to) {
	case IBV_QPS_RESET:
		pair->waiting_count = pair->outstanding = 0;
		break;
	case IBV_QPS_INIT:
		if ((from != IBV_QPS_RESET && from != IBV_QPS_INIT) || mask != init || attributes->port_num != 1)
			result = EINVAL;
		pair->attributes.qp_access_flags = attributes->qp_access_flags;
		break;
	case IBV_QPS_RTR:
		if (from != IBV_QPS_INIT || mask != receive || !attributes->ah_attr.is_global || attributes->ah_attr.port_num != 1 ||
		    attributes->ah_attr.grh.sgid_index >= GIDS || attributes->path_mtu > (enum ibv_mtu)pair->device->active_mtu ||
		    attributes->max_dest_rd_atomic > 16) {
			result = EINVAL;
			break;
		}
		gid_of(pair->device, attributes->ah_attr.grh.sgid_index, &own);
		if (own.global.subnet_prefix == 0 && own.global.interface_id == 0)
			result = EINVAL;
		if (pair->device->rtr_errno && (pair->device->rtr_fail_gid_index == -1 ||
						pair->device->rtr_fail_gid_index == attributes->ah_attr.grh.sgid_index))
			result = pair->device->rtr_errno;
		pair->attributes.dest_qp_num = attributes->dest_qp_num;
		pair->attributes.ah_attr = attributes->ah_attr;
		break;
	case IBV_QPS_RTS:
		if ((from != IBV_QPS_RTR && from != IBV_QPS_SQD) || (from == IBV_QPS_RTR && mask != send) || attributes->max_rd_atomic > 16)
			result = EINVAL;
		break;
	case IBV_QPS_SQD:
		if (from != IBV_QPS_RTS)
			result = EINVAL;
		break;
	case IBV_QPS_ERR:
		fail_pair(pair);
		break;
	default:
		result = EINVAL;
	}
	if (result == 0)
		raw->state = to;
	if (result == 0 && to == IBV_QPS_RTS)
		run(pair);
	pthread_mutex_unlock(&lock);
	return result;
}

int ibv_query_qp(struct ibv_qp *raw, struct ibv_qp_attr *attributes, int mask, struct ibv_qp_init_attr *initial)
{
	struct pair *pair = (struct pair *)raw;
	(void)mask;
	memset(attributes, 0, sizeof *attributes);
	memset(initial, 0, sizeof *initial);
	pthread_mutex_lock(&lock);
	*attributes = pair->attributes;
	attributes->qp_state = raw->state;
	pthread_mutex_unlock(&lock);
	initial->cap = pair->cap;
	return 0;
}

/* The queue pair that `pair` is connected to, if the way to it is open. */
static struct pair *peer_of(struct pair *pair)
{
	struct pair *peer = find_pair(pair->attributes.dest_qp_num);
	if (!peer || (peer->qp.state != IBV_QPS_RTR && peer->qp.state != IBV_QPS_RTS && peer->qp.state != IBV_QPS_SQD))
		return NULL;
	if (peer->attributes.dest_qp_num != pair->qp.qp_num)
		return NULL;
	if (pair->device->port_state != IBV_PORT_ACTIVE || peer->device->port_state != IBV_PORT_ACTIVE)
		return NULL;
	union ibv_gid gid;
	gid_of(peer->device, peer->attributes.ah_attr.grh.sgid_index, &gid);
	return memcmp(gid.raw, pair->attributes.ah_attr.grh.dgid.raw, 16) == 0 ? peer : NULL;
}

static enum ibv_wc_status execute(struct pair *pair, struct work *work)
{
	struct device *device = pair->device;
	int reading = work->opcode == IBV_WR_RDMA_READ;
	if (due(&device->status_at))
		return device->status;
	void *local = translate(device, pair->qp.pd, work->piece.lkey, work->piece.addr, work->piece.length, reading ? IBV_ACCESS_LOCAL_WRITE : 0);
	if (!local) {
		device->protection_errors++;
		return IBV_WC_LOC_PROT_ERR;
	}
	struct pair *peer = peer_of(pair);
	if (!peer)
		return IBV_WC_RETRY_EXC_ERR;
	unsigned access = reading ? IBV_ACCESS_REMOTE_READ : IBV_ACCESS_REMOTE_WRITE;
	void *remote = NULL;
	if (peer->attributes.qp_access_flags & access)
		remote = translate(peer->device, peer->qp.pd, work->remote_key, work->remote_address, work->piece.length, access);
	if (!remote) {
		struct ibv_async_event event = {.event_type = IBV_EVENT_QP_ACCESS_ERR, .element.qp = &peer->qp};
		if (peer != pair)
			fail_pair(peer);
		raise_event((struct context *)peer->qp.context, &event);
		return IBV_WC_REM_ACCESS_ERR;
	}
	if (reading)
		device->bytes_read += work->piece.length;
	else
		device->bytes_written += work->piece.length;
	if (device->copy && reading)
		memmove(local, remote, work->piece.length);
	else if (device->copy)
		memmove(remote, local, work->piece.length);
	return IBV_WC_SUCCESS;
}

/* Carries out what waits, unless the test holds it. */
static void run(struct pair *pair)
{
	while (pair->qp.state == IBV_QPS_RTS && pair->waiting_count > 0 && !pair->device->hold) {
		struct work work = *take_waiting(pair);
		enum ibv_wc_status status = execute(pair, &work);
		complete(pair, work.id, status, work.opcode, status ? 0 : work.piece.length);
		if (status != IBV_WC_SUCCESS)
			fail_pair(pair);
	}
}

static int post(struct ibv_qp *raw, struct ibv_send_wr *work, struct ibv_send_wr **bad)
{
	struct pair *pair = (struct pair *)raw;
	int result = 0;
	long since = now(pair->device);
	pthread_mutex_lock(&lock);
	pair->device->posts++;
	for (; work; work = work->next) {
		if (raw->state != IBV_QPS_RTS && raw->state != IBV_QPS_SQD && raw->state != IBV_QPS_ERR)
			result = EINVAL;
		else if (work->num_sge != 1 || (work->opcode != IBV_WR_RDMA_READ && work->opcode != IBV_WR_RDMA_WRITE) ||
			 !(work->send_flags & IBV_SEND_SIGNALED))
			result = EINVAL;
		else if (pair->outstanding == pair->cap.max_send_wr)
			result = ENOMEM;
		else if (due(&pair->device->post_fail_at))
			result = pair->device->post_errno;
		if (result) {
			*bad = work;
			break;
		}
		pair->device->posted++;
		pair->outstanding++;
		pair->waiting[(pair->first + pair->waiting_count++) % pair->cap.max_send_wr] = (struct work){
			.id = work->wr_id,
			.remote_address = work->wr.rdma.remote_addr,
			.remote_key = work->wr.rdma.rkey,
			.piece = work->sg_list[0],
			.opcode = work->opcode,
		};
		if (raw->state == IBV_QPS_ERR)
			fail_pair(pair);
	}
	run(pair);
	if (pair->device->doorbell_errno) {
		result = pair->device->doorbell_errno;
		*bad = NULL;
		pair->device->doorbell_errno = 0;
	}
	pthread_mutex_unlock(&lock);
	spent(&pair->device->work_ns, pair->device, since);
	return result;
}

const char *ibv_wc_status_str(enum ibv_wc_status status)
{
	switch (status) {
	case IBV_WC_SUCCESS: return "success";
	case IBV_WC_LOC_PROT_ERR: return "local protection error";
	case IBV_WC_WR_FLUSH_ERR: return "Work Request Flushed Error";
	case IBV_WC_REM_ACCESS_ERR: return "remote access error";
	case IBV_WC_RETRY_EXC_ERR: return "transport retry counter exceeded";
	default: return "other error";
	}
}
