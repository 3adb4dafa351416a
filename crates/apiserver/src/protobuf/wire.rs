//! The wire format of protobuf, as far as Kubernetes uses it. Knows no messages.

/// The value of a field on the wire.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scalar<'a> {
    /// A variable-length number.
    Number(u64),
    /// Eight bytes.
    Fixed(u64),
    /// Text, bytes or a message.
    Bytes(&'a [u8]),
}

/// One field on the wire.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Part<'a> {
    /// Its number.
    pub number: u64,
    /// Its value.
    pub scalar: Scalar<'a>,
}

/// The fields of a message, one after another. Ends at the first error.
#[derive(Debug)]
pub struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    /// The fields in `bytes`.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    fn number(&mut self) -> Result<u64, &'static str> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let (&byte, rest) = self.rest.split_first().ok_or("a number is cut off")?;
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
            .ok_or("a field is cut off")?;
        self.rest = rest;
        Ok(taken)
    }

    fn part(&mut self) -> Result<Part<'a>, &'static str> {
        let tag = self.number()?;
        let scalar = match tag & 7 {
            0 => Scalar::Number(self.number()?),
            1 => {
                let bytes = self.take(8)?.try_into().map_err(|_| "a field is cut off")?;
                Scalar::Fixed(u64::from_le_bytes(bytes))
            }
            2 => {
                let length = self.number()?;
                Scalar::Bytes(self.take(length)?)
            }
            5 => {
                let bytes = self.take(4)?.try_into().map_err(|_| "a field is cut off")?;
                Scalar::Fixed(u64::from(u32::from_le_bytes(bytes)))
            }
            _ => return Err("a field has an unknown encoding"),
        };
        Ok(Part {
            number: tag >> 3,
            scalar,
        })
    }
}

impl<'a> Iterator for Reader<'a> {
    type Item = Result<Part<'a>, &'static str>;

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

/// The bytes of a message's first field.
pub fn first_bytes(message: &[u8]) -> Result<Option<&[u8]>, &'static str> {
    for part in Reader::new(message) {
        if let Part {
            number: 1,
            scalar: Scalar::Bytes(bytes),
        } = part?
        {
            return Ok(Some(bytes));
        }
    }
    Ok(None)
}

/// The text of a message's first field.
pub fn first_text(message: &[u8]) -> Result<Option<&str>, &'static str> {
    first_bytes(message)?
        .map(|bytes| std::str::from_utf8(bytes).map_err(|_| "a text is not UTF-8"))
        .transpose()
}
