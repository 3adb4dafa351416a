//! What the API takes of an event.

/// A note longer than this is refused by the API server.
const NOTE_MAX: usize = 1_024;

/// A note as an event can carry it: cut short, at a character's end, where it is too long.
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
    fn a_note_that_is_too_long_is_cut_between_characters() {
        let fits = "x".repeat(NOTE_MAX);
        assert_eq!(fitting_note(fits.clone()), fits);
        let cut = fitting_note("é".repeat(NOTE_MAX));
        assert!(cut.len() <= NOTE_MAX && cut.ends_with("é…"), "{cut}");
    }
}
