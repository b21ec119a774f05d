//! Reads choices from the bytes of an input.

/// What is left of an input. When nothing is left, zeros come.
pub struct Input<'a> {
    rest: &'a [u8],
}

impl<'a> Input<'a> {
    pub fn new(rest: &'a [u8]) -> Input<'a> {
        Input { rest }
    }

    pub fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    /// Up to `length` bytes.
    pub fn take(&mut self, length: usize) -> &'a [u8] {
        let (taken, rest) = self.rest.split_at(length.min(self.rest.len()));
        self.rest = rest;
        taken
    }

    pub fn rest(self) -> &'a [u8] {
        self.rest
    }

    pub fn byte(&mut self) -> u8 {
        self.take(1).first().copied().unwrap_or(0)
    }

    /// Below `bound`.
    pub fn below(&mut self, bound: usize) -> usize {
        let bytes = [self.byte(), self.byte()];
        u16::from_le_bytes(bytes) as usize % bound
    }

    pub fn number(&mut self) -> u64 {
        let mut bytes = [0; 8];
        let taken = self.take(8);
        bytes[..taken.len()].copy_from_slice(taken);
        u64::from_le_bytes(bytes)
    }

    pub fn choose<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.byte() as usize % from.len()]
    }
}
