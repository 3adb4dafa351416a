//! `x-kubernetes-validations`: CEL rules of a schema, compiled with the schema and evaluated on every write.
//!
//! The language is CEL with the Kubernetes libraries. Evaluation is limited per rule and per object by the cost limits of
//! kube-apiserver, so a rule cannot block the server. Static typing is weaker than in CEL: undeclared names, functions and fields
//! are compile errors, and other type errors appear when the rule is evaluated.

mod ast;
mod check;
mod comprehension;
mod eval;
mod functions;
mod lex;
mod operators;
mod parse;
mod rules;
mod value;

pub(crate) use rules::RuleTree;

#[cfg(test)]
mod tests;
