//! Memory
//!
//! Peers reach registered memory only. Ranges are half open: they may touch, but no byte may be in two of
//! them. The cost of registering and unregistering hardly depends on how much is registered already.

use std::ffi::{c_char, c_int, c_void};
use std::time::Duration;

use crate::capi::growth::{self, Growing};
use crate::capi::te::engine::te_engine;
use crate::capi::te::status::te_status;
use crate::capi::te::{call, with};
use crate::capi::{guard, memory, text};
use crate::config::Parallelism;
use crate::engine::{Engine, MemoryOptions, RegionInfo};
use crate::error::{Code, Error, Result};
use crate::registry::RegistrationCost;
use crate::topology;

/// Peers may read and write the memory.
pub const TE_ACCESS_REMOTE: u32 = 0;
/// Only transfers of this engine may use the memory, as their local side.
pub const TE_ACCESS_LOCAL: u32 = 1;

/// Peers learn of the change before the call returns.
pub const TE_PUBLISH_NOW: u32 = 0;
/// Peers learn of the registration with the next one, or the next unregistration, that is published. Saves time
/// where a metadata server is slow. Without one it makes no difference: peers ask when they need it.
pub const TE_PUBLISH_LATER: u32 = 1;

/// As the environment variable TE_REGISTER_REFCOUNT says; without it, as TE_REFERENCES_OFF.
pub const TE_REFERENCES_DEFAULT: u32 = 0;
/// Registering the same range, location and access again succeeds, and it stays until it has been
/// unregistered as often.
pub const TE_REFERENCES_ON: u32 = 1;
/// Registering a range again gives TE_ERR_ADDRESS_OVERLAPPED.
pub const TE_REFERENCES_OFF: u32 = 2;

/// As the environment variable MC_ENABLE_PARALLEL_REG_MR says; without it, as TE_PARALLEL_AUTO.
pub const TE_PARALLEL_DEFAULT: u32 = 0;
/// Devices register the memory side by side where that is faster.
pub const TE_PARALLEL_AUTO: u32 = 1;
/// Devices register the memory one after the other.
pub const TE_PARALLEL_OFF: u32 = 2;
/// Devices register the memory side by side, whatever its size.
pub const TE_PARALLEL_ON: u32 = 3;

/// How memory is registered.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct te_memory_options {
    /// sizeof(te_memory_options).
    pub struct_size: usize,
    /// Where the memory is: "cpu:0" for a NUMA node, "cuda:1" for a GPU; "*" or NULL: found out when it
    /// matters. Transports choose NICs by it. Unknown texts count as "*".
    pub location: *const c_char,
    /// TE_ACCESS_REMOTE or TE_ACCESS_LOCAL.
    pub access: u32,
    /// TE_PUBLISH_NOW or TE_PUBLISH_LATER.
    pub publish: u32,
    /// TE_REFERENCES_DEFAULT, TE_REFERENCES_ON or TE_REFERENCES_OFF.
    pub count_references: u32,
    /// TE_PARALLEL_DEFAULT, TE_PARALLEL_AUTO, TE_PARALLEL_OFF or TE_PARALLEL_ON. Without a device that memory is
    /// registered with, as with TCP, all are the same.
    pub parallel: u32,
}

// SAFETY: the first field is `struct_size`, and all zeros are a valid value.
unsafe impl Growing for te_memory_options {
    const FIRST_VERSION: usize = 32;
}

/// A range of memory of this process.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct te_buffer {
    /// Its first byte.
    pub addr: *mut c_void,
    /// Its length in bytes.
    pub length: usize,
}

// SAFETY: all zeros are a valid value.
unsafe impl Growing for te_buffer {
    const FIRST_VERSION: usize = 16;
}

/// A registered range of memory, of this process or of a peer.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct te_memory_region {
    /// sizeof(te_memory_region). Functions that fill arrays set it.
    pub struct_size: usize,
    /// First byte, in the address space of the process that registered it.
    pub addr: u64,
    /// Length in bytes.
    pub length: u64,
    /// TE_ACCESS_REMOTE or TE_ACCESS_LOCAL.
    pub access: u32,
    /// Zero.
    pub reserved: u32,
    /// Where the memory is, with a NUL at its end; longer texts are cut. For memory of a peer over TCP it is the
    /// peer's name: the protocol does not tell more.
    pub location: [c_char; 64],
}

// SAFETY: all zeros are a valid value.
unsafe impl Growing for te_memory_region {
    const FIRST_VERSION: usize = 96;
}

impl te_memory_region {
    /// The region as C sees it, in a struct of `struct_size` bytes.
    pub(super) fn new(region: &RegionInfo, struct_size: usize) -> te_memory_region {
        te_memory_region {
            struct_size,
            addr: region.address,
            length: region.length,
            access: if region.remote_accessible { TE_ACCESS_REMOTE } else { TE_ACCESS_LOCAL },
            reserved: 0,
            location: text::array(&region.location),
        }
    }
}

/// What registering a range with devices took, in nanoseconds. Of ranges that were registered in one call each
/// shows what the whole call took.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct te_registration_cost {
    /// sizeof(te_registration_cost).
    pub struct_size: usize,
    /// From the beginning of the call to its end. The parts below, without the times of single devices, add up
    /// to it.
    pub total_ns: u64,
    /// Finding out which pages are there.
    pub residency_ns: u64,
    /// Having the kernel provide the pages that are not.
    pub population_ns: u64,
    /// From the first call that registers with a device to the end of the last: ibv_reg_mr or its like.
    pub pinning_ns: u64,
    /// Telling a metadata server, together with others that did so at the time.
    pub publishing_ns: u64,
    /// Everything else: this library's own work.
    pub book_keeping_ns: u64,
    /// How many threads took part, the caller's among them.
    pub threads: u32,
    /// Number of devices.
    pub device_count: u32,
}

// SAFETY: the first field is `struct_size`, and all zeros are a valid value.
unsafe impl Growing for te_registration_cost {
    const FIRST_VERSION: usize = 64;
}

/// What registering a range with one device took.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct te_device_cost {
    /// sizeof(te_device_cost). Functions that fill arrays set it.
    pub struct_size: usize,
    /// Inside the calls that register with the device, added up. Those of several devices overlap where they work
    /// side by side.
    pub pinning_ns: u64,
    /// The device, such as "mlx5_0", with a NUL at its end; longer names are cut.
    pub name: [c_char; 64],
}

// SAFETY: all zeros are a valid value.
unsafe impl Growing for te_device_cost {
    const FIRST_VERSION: usize = 80;
}

/// Registers `length` bytes at `addr`, until te_unregister_local_memory or te_engine_destroy.
///
/// `options` may be NULL. On failure nothing is registered. Errors: TE_ERR_INVALID_ARGUMENT for NULL, no
/// bytes, or a range past the end of the address space; TE_ERR_ADDRESS_OVERLAPPED, with the other range in
/// the text; TE_ERR_METADATA if the metadata server could not be told; TE_ERR_CONTEXT, TE_ERR_LIMIT and TE_ERR_FAULT if a
/// device or the system refused.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn te_register_local_memory(
    engine: *mut te_engine,
    addr: *mut c_void,
    length: usize,
    options: *const te_memory_options,
) -> te_status {
    with(engine, |engine| {
        // SAFETY: the caller passes NULL or a struct of `struct_size` bytes with NUL-terminated texts.
        let options = unsafe { read_memory_options(engine, options) }?;
        // SAFETY: the caller owns the memory until it is unregistered.
        engine.register(unsafe { memory::range(addr, length as u64) }?, &options)
    })
}

/// Unregisters the memory that was registered at `addr`, the first byte of its range.
///
/// It refuses new transfers on the memory at once, ends those under way within a fraction of a second, and
/// then releases it. After 0, neither peers nor this engine touch it. Call it before the memory is unmapped:
/// what is mapped at a registered address later is open to peers as well. Errors: TE_ERR_ADDRESS_NOT_REGISTERED;
/// TE_ERR_BATCH_BUSY if a transfer did not end within five seconds: the memory is still in use, and the call
/// can be repeated; TE_ERR_METADATA if the metadata server could not be told, though the memory is released: that
/// is tried again in the background; TE_ERR_INVALID_ARGUMENT for the arena of a pool, which te_pool_close unregisters.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn te_unregister_local_memory(engine: *mut te_engine, addr: *mut c_void) -> te_status {
    with(engine, |engine| engine.unregister(addr as u64))
}

/// Registers `count` ranges with the same options: all of them or, on failure, none. Peers are told once.
///
/// `buffers` is an array with elements of `buffer_size` bytes, sizeof(te_buffer); it may be NULL if `count`
/// is 0. Errors as for te_register_local_memory; ranges may not overlap each other either.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn te_register_local_memory_batch(
    engine: *mut te_engine,
    buffers: *const te_buffer,
    buffer_size: usize,
    count: usize,
    options: *const te_memory_options,
) -> te_status {
    with(engine, |engine| {
        // SAFETY: the caller passes NULL or a struct of `struct_size` bytes with NUL-terminated texts.
        let options = unsafe { read_memory_options(engine, options) }?;
        // SAFETY: the caller passes `count` elements of `buffer_size` bytes.
        let buffers = unsafe { growth::read_array(buffers, buffer_size, count, "buffers") }?;
        let ranges = buffers
            // SAFETY: the caller owns the memory until it is unregistered.
            .map(|buffer| buffer.and_then(|buffer| unsafe { memory::range(buffer.addr, buffer.length as u64) }))
            .collect::<Result<Vec<_>>>()?;
        engine.register_batch(&ranges, &options)
    })
}

/// Unregisters the memory that was registered at each of `count` addresses. Peers are told once.
///
/// An address that fails does not keep the others from being released; the first failure is returned. `addrs`
/// may be NULL if `count` is 0. Errors as for te_unregister_local_memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn te_unregister_local_memory_batch(
    engine: *mut te_engine,
    addrs: *const *mut c_void,
    count: usize,
) -> te_status {
    with(engine, |engine| {
        // SAFETY: the caller passes `count` addresses.
        engine.unregister_batch(&unsafe { memory::read_addresses(addrs, count) }?)
    })
}

/// Finds the registered range of this engine that holds the byte at `addr`, also one that is being registered or
/// unregistered, and describes it in `region`.
///
/// Set `region->struct_size` before the call. Errors: TE_ERR_ADDRESS_NOT_REGISTERED.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn te_find_local_memory(
    engine: *mut te_engine,
    addr: *const c_void,
    region: *mut te_memory_region,
) -> te_status {
    with(engine, |engine| {
        // SAFETY: the caller passes a struct of `struct_size` bytes.
        let size = unsafe { growth::output_size(region, "region") }?;
        let found = engine
            .find_region(addr as u64)
            .ok_or_else(|| Error::quiet(Code::AddressNotRegistered, format!("no registered range holds {addr:p}")))?;
        // SAFETY: as above.
        unsafe { growth::write(region, size, &te_memory_region::new(&found, size)) };
        Ok(())
    })
}

/// Finds a registered range of this engine that has a byte in common with the `length` bytes at `addr`, also
/// one that is being registered or unregistered, and describes it in `region`.
///
/// Set `region->struct_size` before the call. Errors: TE_ERR_ADDRESS_NOT_REGISTERED if there is none, as for
/// no bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn te_find_overlap(
    engine: *mut te_engine,
    addr: *const c_void,
    length: usize,
    region: *mut te_memory_region,
) -> te_status {
    with(engine, |engine| {
        // SAFETY: the caller passes a struct of `struct_size` bytes.
        let size = unsafe { growth::output_size(region, "region") }?;
        // SAFETY: the range is looked up, not used.
        let range = unsafe { memory::local_range(addr.cast_mut(), length as u64, 0) }?;
        let found = engine.find_overlap(range).ok_or_else(|| {
            Error::quiet(Code::AddressNotRegistered, format!("no registered range has a byte of the {length} at {addr:p}"))
        })?;
        // SAFETY: as above.
        unsafe { growth::write(region, size, &te_memory_region::new(&found, size)) };
        Ok(())
    })
}

/// A part of a range of memory that is in one place.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct te_location_entry {
    /// sizeof(te_location_entry). Functions that fill arrays set it.
    pub struct_size: usize,
    /// First byte.
    pub addr: u64,
    /// Length in bytes.
    pub length: u64,
    /// Where it is, with a NUL at its end: "cpu:0" for a NUMA node, "*" if it is not known.
    pub location: [c_char; 64],
}

// SAFETY: all zeros are a valid value.
unsafe impl Growing for te_location_entry {
    const FIRST_VERSION: usize = 88;
}

/// Finds out where memory of this process is. Pages that the process has not touched have no place yet: they
/// count as "*", and stay untouched.
///
/// The `length` bytes at `addr`, which need not be registered, are described in order of address, as parts
/// that touch. With `first_page_only` other than 0 it is one part, which is where its first page is; else
/// each page is asked for, which takes one system call for 512 pages. `entries` is an array of `capacity`
/// elements of `entry_size` bytes, sizeof(te_location_entry); it may be NULL if `capacity` is 0. `count`
/// receives how many parts there are, which may be more than `capacity`; the first `capacity` are described
/// then. Errors: TE_ERR_INVALID_ARGUMENT for a range that is NULL or runs past the end of the address space.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn te_memory_location(
    addr: *const c_void,
    length: usize,
    first_page_only: c_int,
    entries: *mut te_location_entry,
    entry_size: usize,
    capacity: usize,
    count: *mut usize,
) -> te_status {
    call(|| {
        guard::check_output(count, "count")?;
        growth::check_array(entries, entry_size, capacity, "entries")?;
        // SAFETY: the range is looked up, not used.
        let range = unsafe { memory::range(addr.cast_mut(), length as u64) }?;
        let parts = match first_page_only {
            0 => topology::locations_of(range),
            _ => vec![(range, topology::location_of(range).unwrap_or_else(|| topology::WILDCARD.into()))],
        };
        for (index, (part, location)) in parts.iter().take(capacity).enumerate() {
            let (addr, length) = (part.address(), part.length());
            let entry = te_location_entry { struct_size: entry_size, addr, length, location: text::array(location) };
            // SAFETY: the caller passes `capacity` elements of `entry_size` bytes.
            unsafe { growth::write_element(entries, entry_size, index, &entry) };
        }
        // SAFETY: `count` is not NULL, and the caller passes a place for a number.
        unsafe { count.write(parts.len()) };
        Ok(())
    })
}

/// Tells what registering the range took that holds the byte at `addr`, and what of that was each device's.
///
/// Set `cost->struct_size` before the call. `devices` is an array of `capacity` elements of `device_size` bytes,
/// sizeof(te_device_cost); it may be NULL if `capacity` is 0. `cost->device_count` may be more than `capacity`;
/// the first `capacity` are described then. Errors: TE_ERR_ADDRESS_NOT_REGISTERED, also for a range that neither a
/// device nor a metadata server was told of, as with TCP and P2PHANDSHAKE: registering that is only a matter of
/// some hundred nanoseconds, which nobody takes down.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn te_get_registration_cost(
    engine: *mut te_engine,
    addr: *const c_void,
    cost: *mut te_registration_cost,
    devices: *mut te_device_cost,
    device_size: usize,
    capacity: usize,
) -> te_status {
    with(engine, |engine| {
        // SAFETY: the caller passes a struct of `struct_size` bytes.
        let size = unsafe { growth::output_size(cost, "cost") }?;
        growth::check_array(devices, device_size, capacity, "devices")?;
        let found = engine.registration_cost(addr as u64).ok_or_else(|| {
            Error::quiet(
                Code::AddressNotRegistered,
                format!("no range that a device or a metadata server was told of holds {addr:p}"),
            )
        })?;
        for (index, (name, pinning)) in found.devices.iter().zip(&found.cost.pinning).take(capacity).enumerate() {
            let device = te_device_cost { struct_size: device_size, pinning_ns: nanoseconds(*pinning), name: text::array(name) };
            // SAFETY: the caller passes `capacity` elements of `device_size` bytes.
            unsafe { growth::write_element(devices, device_size, index, &device) };
        }
        // SAFETY: as above.
        unsafe { growth::write(cost, size, &te_registration_cost::new(&found.cost, size)) };
        Ok(())
    })
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

impl te_registration_cost {
    /// The cost as C sees it, in a struct of `struct_size` bytes.
    fn new(cost: &RegistrationCost, struct_size: usize) -> te_registration_cost {
        te_registration_cost {
            struct_size,
            total_ns: nanoseconds(cost.total),
            residency_ns: nanoseconds(cost.residency),
            population_ns: nanoseconds(cost.population),
            pinning_ns: nanoseconds(cost.pinning_elapsed),
            publishing_ns: nanoseconds(cost.publishing),
            book_keeping_ns: nanoseconds(cost.book_keeping),
            threads: cost.threads as u32,
            device_count: cost.pinning.len() as u32,
        }
    }
}

/// Describes the registered ranges of this engine in `regions`, in the order in which they were registered.
///
/// `regions` is an array of `capacity` elements of `region_size` bytes, sizeof(te_memory_region); it may be
/// NULL if `capacity` is 0. `count` receives how many ranges there are, which may be more than `capacity`;
/// the first `capacity` are described then.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn te_list_local_memory(
    engine: *mut te_engine,
    regions: *mut te_memory_region,
    region_size: usize,
    capacity: usize,
    count: *mut usize,
) -> te_status {
    with(engine, |engine| {
        // SAFETY: the caller passes `capacity` elements of `region_size` bytes, and a place for a number.
        unsafe { write_regions(regions, region_size, capacity, count, || Ok(engine.regions())) }
    })
}

/// Fills the caller's array of regions.
///
/// # Safety
/// `regions` must have room for `capacity` elements of `region_size` bytes, and `count` for a number.
pub(super) unsafe fn write_regions(
    regions: *mut te_memory_region,
    region_size: usize,
    capacity: usize,
    count: *mut usize,
    list: impl FnOnce() -> Result<Vec<RegionInfo>>,
) -> Result<()> {
    guard::check_output(count, "count")?;
    growth::check_array(regions, region_size, capacity, "regions")?;
    let list = list()?;
    for (index, region) in list.iter().take(capacity).enumerate() {
        // SAFETY: the caller passes `capacity` elements of `region_size` bytes.
        unsafe { growth::write_element(regions, region_size, index, &te_memory_region::new(region, region_size)) };
    }
    // SAFETY: `count` is not NULL, and the caller passes a place for a number.
    unsafe { count.write(list.len()) };
    Ok(())
}

/// Reads and checks the caller's memory options.
///
/// # Safety
/// `options` must be NULL or a struct of `struct_size` bytes with NUL-terminated texts.
unsafe fn read_memory_options(engine: &Engine, options: *const te_memory_options) -> Result<MemoryOptions> {
    // SAFETY: as for this function.
    let options = unsafe { growth::read_options(options) }?;
    Ok(MemoryOptions {
        // SAFETY: as for this function.
        location: unsafe { text::read_location(options.location) },
        remote_accessible: match options.access {
            TE_ACCESS_REMOTE => true,
            TE_ACCESS_LOCAL => false,
            other => return Err(guard::invalid(format!("options->access is {other}; it must be a TE_ACCESS_ value (0 or 1)"))),
        },
        counted: match options.count_references {
            TE_REFERENCES_DEFAULT => engine.config().register_refcount,
            TE_REFERENCES_ON => true,
            TE_REFERENCES_OFF => false,
            other => {
                return Err(guard::invalid(format!(
                    "options->count_references is {other}; it must be a TE_REFERENCES_ value (0 to 2)"
                )));
            }
        },
        publish: match options.publish {
            TE_PUBLISH_NOW => true,
            TE_PUBLISH_LATER => false,
            other => return Err(guard::invalid(format!("options->publish is {other}; it must be a TE_PUBLISH_ value (0 or 1)"))),
        },
        parallelism: match options.parallel {
            TE_PARALLEL_DEFAULT => None,
            TE_PARALLEL_AUTO => Some(Parallelism::Auto),
            TE_PARALLEL_OFF => Some(Parallelism::Sequential),
            TE_PARALLEL_ON => Some(Parallelism::Parallel),
            other => {
                return Err(guard::invalid(format!("options->parallel is {other}; it must be a TE_PARALLEL_ value (0 to 3)")));
            }
        },
    })
}
