//! The limits of the API for events.

/// The API server refuses longer notes.
const NOTE_MAX: usize = 1_024;

/// Truncates a note that is too long, at a character boundary.
pub fn fitting_note(mut note: String) -> String {
    if note.len() > NOTE_MAX {
        let mut end = NOTE_MAX - '…'.len_utf8();
        while !note.is_char_boundary(end) {
            end -= 1;
        }
        note.truncate(end);
        note.push('…');
    }
    note
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_that_is_too_long_is_truncated_at_a_character_boundary() {
        let fits = "x".repeat(NOTE_MAX);
        assert_eq!(fitting_note(fits.clone()), fits);
        let cut = fitting_note("é".repeat(NOTE_MAX));
        assert!(cut.len() <= NOTE_MAX && cut.ends_with("é…"), "{cut}");
    }
}
