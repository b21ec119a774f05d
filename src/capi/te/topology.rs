//! Topologies
//!
//! A topology says which NICs serve which memory: for each location, such as "cpu:0" or "cuda:1", the NICs to
//! prefer and those that may be used as well. It is looked up in the hardware, or given as a NIC priority
//! matrix: {"cpu:0": [["mlx5_0"], ["mlx5_1"]], ...} in JSON. An engine has one of its own; a program that
//! wants to see or change it before a transport is installed makes one, and gives it to the engine in
//! te_engine_options. A change of a topology holds for transports that are installed later.

use std::ffi::{c_char, c_int, c_void};

use crate::capi::te::call;
use crate::capi::te::status::{TE_OK, te_status};
use crate::capi::{guard, handle, text};
use crate::config::Config;
use crate::error::Result;
use crate::topology::{LiveTopology, Machine, Topology};

/// A topology.
pub struct te_topology {
    _private: [u8; 0],
}

/// Creates a topology with nothing in it. Free it with te_topology_destroy.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn te_topology_create(topology: *mut *mut te_topology) -> te_status {
    call(|| {
        guard::check_output(topology, "topology")?;
        let created = LiveTopology::new(Config::from_environment().topology.round_robin);
        let key = handle::insert_topology(created.into());
        // SAFETY: `topology` is not NULL, and the caller passes a place for a pointer.
        unsafe { topology.write(key.as_pointer().cast()) };
        Ok(())
    })
}

/// Destroys the handle of a topology. Engines that have it keep it. NULL is fine and does nothing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn te_topology_destroy(topology: *mut te_topology) -> te_status {
    call(|| if topology.is_null() { Ok(()) } else { handle::destroy_topology(topology as u64) })
}

/// Looks at the NICs of this machine and puts them in, in place of what was there: a location for each NUMA
/// node, whose own NICs are preferred, while all others may be used. A machine without NICs is no error.
///
/// Only NICs that the process may open and of which a port is up. `nics` is an array of `count` names of
/// those to take; any if there are none. The environment variable MC_TE_FILTERS, read at each call, holds as
/// well.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn te_topology_discover(topology: *mut te_topology, nics: *const *const c_char, count: usize) -> te_status {
    with_topology(topology, |topology| {
        // SAFETY: the caller passes `count` NUL-terminated texts.
        let nics = unsafe { text::read_array(nics, count, "nics") }?;
        let filters = Config::from_environment().topology.filters;
        topology.replace(Topology::discover(&Machine::default(), &[&filters, &nics]));
        Ok(())
    })
}

/// Puts a NIC priority matrix in, in place of what was there. It may name NICs that this machine does not have.
///
/// Errors: TE_ERR_MALFORMED_JSON; what was there stays.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn te_topology_parse(topology: *mut te_topology, json: *const c_char) -> te_status {
    with_topology(topology, |topology| {
        // SAFETY: the caller passes a NUL-terminated text.
        topology.replace(Topology::parse(unsafe { text::read(json, "json") }?)?);
        Ok(())
    })
}

/// Gives the NIC priority matrix, without NICs that are disabled; "{}" if there is nothing in it. `json`
/// receives a text that the caller frees with te_free_text.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn te_topology_json(topology: *mut te_topology, json: *mut *mut c_char) -> te_status {
    // SAFETY: the caller passes a place for a pointer.
    with_topology(topology, |topology| unsafe { text::give(json, "json", || Ok(topology.current().to_json())) })
}

/// Gives the name of NIC number `index`. NICs are numbered from 0, in the order in which the matrix names
/// them for the first time, locations being in the order of their texts and preferred NICs before others. One
/// that is disabled keeps its number.
///
/// `name` receives a text that the caller frees with te_free_text. Errors: TE_ERR_DEVICE_NOT_FOUND for a
/// number beyond the last.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn te_topology_nic_name(topology: *mut te_topology, index: usize, name: *mut *mut c_char) -> te_status {
    // SAFETY: the caller passes a place for a pointer.
    with_topology(topology, |topology| unsafe { text::give(name, "name", || topology.nic(index)) })
}

/// Describes the NICs, as the system knows them, and which one serves which memory: in JSON if `as_json` is
/// not 0, an object with "local_nics" and "topology", else for people.
///
/// `text` receives a text that the caller frees with te_free_text.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn te_topology_links(topology: *mut te_topology, as_json: c_int, text: *mut *mut c_char) -> te_status {
    // SAFETY: the caller passes a place for a pointer.
    with_topology(topology, |topology| unsafe { text::give(text, "text", || Ok(links(topology, as_json != 0))) })
}

/// Chooses a NIC for memory at `location`, as transports do. "*" is a location that all NICs serve.
///
/// `retry` 0 takes one of the preferred NICs, at random, or in turn if the environment variable
/// MC_PATH_ROUNDROBIN said so when the topology was made; that of the name `hint`, which may be NULL, if it
/// is one of them. 1 and more walk through the preferred NICs and then the others. `index` receives the
/// number of the NIC. Errors: TE_ERR_DEVICE_NOT_FOUND if there is no such location, or no NIC for it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn te_topology_select(
    topology: *mut te_topology,
    location: *const c_char,
    hint: *const c_char,
    retry: u32,
    index: *mut usize,
) -> te_status {
    with_topology(topology, |topology| {
        guard::check_output(index, "index")?;
        // SAFETY: the caller passes NUL-terminated texts, or NULL.
        let (location, hint) = unsafe { (text::read(location, "location")?, text::read_optional(hint, "hint")?) };
        let selected = topology.select(location, hint, retry)?;
        // SAFETY: `index` is not NULL, and the caller passes a place for a number.
        unsafe { index.write(selected) };
        Ok(())
    })
}

/// Takes a NIC out of all lists, until something is put in anew. Errors: TE_ERR_DEVICE_NOT_FOUND if there is
/// none of that name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn te_topology_disable(topology: *mut te_topology, nic: *const c_char) -> te_status {
    // SAFETY: the caller passes a NUL-terminated text.
    with_topology(topology, |topology| topology.disable(unsafe { text::read(nic, "nic") }?))
}

/// Has an address of this program stand for a topology, for a class that has one before it has an engine:
/// showLinks and discoverTopology of transfer_engine_c.h work on a cast of the address, too.
///
/// As te_engine_set_alias, which may give the address to an engine later. Errors: those of it, and
/// TE_ERR_INVALID_ARGUMENT for the address of an engine.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn te_topology_set_alias(topology: *mut te_topology, address: *const c_void) -> te_status {
    call(|| handle::set_topology_alias(topology as u64, address as u64))
}

/// A description of the NICs of a topology that no transport has to do with.
pub(crate) fn links(topology: &LiveTopology, as_json: bool) -> String {
    let (topology, config) = (topology.current(), Config::from_environment());
    topology.show(&topology.links(&Machine::default(), config.rdma.port, config.rdma.gid_index), as_json)
}

/// Runs a function of this section on a topology.
fn with_topology(topology: *mut te_topology, body: impl FnOnce(&LiveTopology) -> Result<()>) -> te_status {
    guard::call(guard::negative, || {
        let call = handle::enter_topology(topology as u64)?;
        body(call.target()).map(|()| TE_OK)
    })
}
