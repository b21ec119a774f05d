//! A topology that changes under those who use it: the program discovers or parses into it, and an engine reads it when it installs a
//! transport.
//!
//! NICs have numbers, their places in [`Topology::nics`] of the matrix that was put in last. A NIC that is disabled keeps its number, and is
//! left out of the matrix. `state` is locked for moments.

use std::collections::BTreeSet;

use parking_lot::Mutex;

use super::{Matrix, NicChoice, Topology, WILDCARD};
use crate::error::{Code, Error, Result};

/// A topology with what has been disabled of it.
#[derive(Debug, Default)]
pub struct LiveTopology {
    state: Mutex<State>,
    round_robin: bool,
}

#[derive(Debug, Default)]
struct State {
    whole: Topology,
    disabled: BTreeSet<String>,
}

impl State {
    /// Without what is disabled.
    fn enabled(&self) -> Topology {
        let mut topology = self.whole.clone();
        if !self.disabled.is_empty() {
            for (preferred, available) in topology.matrix.values_mut() {
                preferred.retain(|nic| !self.disabled.contains(nic));
                available.retain(|nic| !self.disabled.contains(nic));
            }
        }
        topology
    }
}

impl LiveTopology {
    /// An empty one. `round_robin`: [`LiveTopology::select`] takes one of several preferred NICs in turn instead of at random.
    pub fn new(round_robin: bool) -> LiveTopology {
        LiveTopology { state: Mutex::default(), round_robin }
    }

    /// Puts a matrix in, in place of what was there. Nothing of it is disabled.
    pub fn replace(&self, topology: Topology) {
        *self.state.lock() = State { whole: topology, disabled: BTreeSet::new() };
    }

    /// What is in it now, without NICs that are disabled.
    pub fn current(&self) -> Topology {
        self.state.lock().enabled()
    }

    /// All NICs by their numbers, those that are disabled included.
    pub fn nics(&self) -> Vec<String> {
        self.state.lock().whole.nics().into_iter().map(str::to_string).collect()
    }

    /// The name of a NIC by its number. DeviceNotFound if there is none.
    pub fn nic(&self, number: usize) -> Result<String> {
        let nics = self.nics();
        nics.get(number).cloned().ok_or_else(|| {
            Error::quiet(Code::DeviceNotFound, format!("the topology has {} NICs, none with number {number}", nics.len()))
        })
    }

    /// Takes a NIC out of all lists. DeviceNotFound if there is none of that name.
    pub fn disable(&self, nic: &str) -> Result<()> {
        let mut state = self.state.lock();
        if !state.whole.nics().contains(&nic) {
            return Err(Error::new(Code::DeviceNotFound, format!("the topology has no NIC '{}'", nic.escape_debug())));
        }
        state.disabled.insert(nic.to_string());
        Ok(())
    }

    /// The number of a NIC for memory at `location`, or at `*`, which all NICs serve.
    ///
    /// `retry` 0 takes one of the preferred NICs, that of the name `hint` if it is one of them; others walk through preferred and available
    /// ones. DeviceNotFound if the location is not in the topology, or none of its NICs is left.
    pub fn select(&self, location: &str, hint: Option<&str>, retry: u32) -> Result<usize> {
        let (nics, matrix) = {
            let state = self.state.lock();
            let nics: Vec<String> = state.whole.nics().into_iter().map(str::to_string).collect();
            (nics, state.enabled().matrix)
        };
        let lists = match location {
            WILDCARD => {
                let all = Topology { matrix };
                (all.nics().into_iter().map(str::to_string).collect(), Vec::new())
            }
            location => matrix.get(location).cloned().unwrap_or_default(),
        };
        let (preferred, available) = &lists;
        if preferred.is_empty() && available.is_empty() {
            let text = format!("the topology has no NIC for memory at '{}'", location.escape_debug());
            return Err(Error::quiet(Code::DeviceNotFound, text));
        }
        let wanted = hint.filter(|hint| retry == 0 && preferred.iter().any(|nic| nic == hint));
        let number = match wanted {
            Some(wanted) => nics.iter().position(|nic| nic == wanted),
            None => {
                let matrix = Matrix::from([(location.to_string(), lists)]);
                NicChoice::new(&matrix, &nics, self.round_robin).select(location, retry, |_| true)
            }
        };
        number.ok_or_else(|| Error::new(Code::Internal, "a NIC of the topology has no number"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn live(text: &str) -> LiveTopology {
        let live = LiveTopology::new(true);
        live.replace(Topology::parse(text).unwrap());
        live
    }

    const TWO_NODES: &str = r#"{"cpu:0":[["a"],["b","c"]],"cpu:1":[["b","c"],["a"]],"cuda:9":[[],[]]}"#;

    #[test]
    fn a_nic_that_is_disabled_keeps_its_number_and_is_chosen_no_more() {
        let live = live(TWO_NODES);
        assert_eq!(live.nics(), ["a", "b", "c"]);
        live.disable("a").unwrap();
        live.disable("a").unwrap();
        assert_eq!(live.nics(), ["a", "b", "c"]);
        assert_eq!(live.current(), Topology::parse(r#"{"cpu:0":[[],["b","c"]],"cpu:1":[["b","c"],[]],"cuda:9":[[],[]]}"#).unwrap());
        for _ in 0..10 {
            assert_ne!(live.select("cpu:0", None, 0).unwrap(), 0);
            assert_ne!(live.select(WILDCARD, Some("a"), 0).unwrap(), 0);
        }
        assert_eq!(live.disable("d").unwrap_err().code(), Code::DeviceNotFound);
        live.replace(Topology::parse(TWO_NODES).unwrap());
        assert_eq!(live.select("cpu:0", None, 0).unwrap(), 0, "what is put in anew is whole");
    }

    #[test]
    fn retries_walk_and_a_hint_decides_between_preferred_ones() {
        let live = live(TWO_NODES);
        let walk: Vec<_> = (1..=4).map(|retry| live.select("cpu:1", None, retry).unwrap()).collect();
        assert_eq!(walk, [1, 2, 0, 1]);
        for _ in 0..5 {
            assert_eq!(live.select("cpu:1", Some("c"), 0).unwrap(), 2);
            assert_ne!(live.select("cpu:1", Some("a"), 0).unwrap(), 0, "a hint at what is not preferred is none");
        }
        assert_eq!(live.select("cpu:1", Some("c"), 1).unwrap(), 1);
    }

    #[test]
    fn a_location_without_nics_is_an_error_and_all_nics_serve_the_wildcard() {
        let live = live(TWO_NODES);
        for location in ["cpu:2", "cuda:9", ""] {
            assert_eq!(live.select(location, None, 0).unwrap_err().code(), Code::DeviceNotFound, "{location}");
        }
        let all: BTreeSet<_> = (0..9).map(|_| live.select(WILDCARD, None, 0).unwrap()).collect();
        assert_eq!(all, BTreeSet::from([0, 1, 2]));
        assert_eq!(LiveTopology::default().select(WILDCARD, None, 0).unwrap_err().code(), Code::DeviceNotFound);
        live.disable("a").unwrap();
        live.disable("b").unwrap();
        live.disable("c").unwrap();
        assert_eq!(live.select(WILDCARD, None, 3).unwrap_err().code(), Code::DeviceNotFound);
    }
}
