//! Reader for the subset of the protobuf wire format that Kubernetes uses. It knows no messages.

/// The value of a field on the wire.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum WireValue<'a> {
    /// A varint.
    Number(u64),
    /// A fixed-width number of four or eight bytes.
    Fixed(u64),
    /// A string, bytes or a message.
    Bytes(&'a [u8]),
}

/// One field on the wire.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WireField<'a> {
    /// The field number.
    pub number: u64,
    /// The value.
    pub scalar: WireValue<'a>,
}

/// Iterates over the fields of a message. Ends at the first error.
#[derive(Debug)]
pub struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    /// Reads the fields in `bytes`.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    fn number(&mut self) -> Result<u64, &'static str> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let (&byte, rest) = self.rest.split_first().ok_or("a number is truncated")?;
            self.rest = rest;
            value |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err("a number is too long")
    }

    fn take(&mut self, length: u64) -> Result<&'a [u8], &'static str> {
        let length = usize::try_from(length).map_err(|_| "a field is too long")?;
        let (taken, rest) = self
            .rest
            .split_at_checked(length)
            .ok_or("a field is truncated")?;
        self.rest = rest;
        Ok(taken)
    }

    fn part(&mut self) -> Result<WireField<'a>, &'static str> {
        let tag = self.number()?;
        let scalar = match tag & 7 {
            0 => WireValue::Number(self.number()?),
            1 => {
                let bytes = self
                    .take(8)?
                    .try_into()
                    .map_err(|_| "a field is truncated")?;
                WireValue::Fixed(u64::from_le_bytes(bytes))
            }
            2 => {
                let length = self.number()?;
                WireValue::Bytes(self.take(length)?)
            }
            5 => {
                let bytes = self
                    .take(4)?
                    .try_into()
                    .map_err(|_| "a field is truncated")?;
                WireValue::Fixed(u64::from(u32::from_le_bytes(bytes)))
            }
            _ => return Err("a field has an unknown wire type"),
        };
        Ok(WireField {
            number: tag >> 3,
            scalar,
        })
    }
}

impl<'a> Iterator for Reader<'a> {
    type Item = Result<WireField<'a>, &'static str>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() {
            return None;
        }
        let part = self.part();
        if part.is_err() {
            self.rest = &[];
        }
        Some(part)
    }
}

/// The bytes of a message's field number 1.
pub fn first_bytes(message: &[u8]) -> Result<Option<&[u8]>, &'static str> {
    for part in Reader::new(message) {
        if let WireField {
            number: 1,
            scalar: WireValue::Bytes(bytes),
        } = part?
        {
            return Ok(Some(bytes));
        }
    }
    Ok(None)
}

/// The string in a message's field number 1.
pub fn first_text(message: &[u8]) -> Result<Option<&str>, &'static str> {
    first_bytes(message)?
        .map(|bytes| std::str::from_utf8(bytes).map_err(|_| "a string is not UTF-8"))
        .transpose()
}
